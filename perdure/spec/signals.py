"""The names of signals on Linux: they differ by platform, and neither a specification nor a replay may."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

SIGNAL_NAMES = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
}


def signal_name(number: int) -> str:
    """The signal's name on Linux."""
    return SIGNAL_NAMES.get(number, f"signal {number}")


def _is_known(name: str) -> str:
    if name not in SIGNAL_NAMES.values():
        raise ValueError("expected the name of a signal that ends processes, such as SIGSEGV")
    return name


SignalName = Annotated[str, AfterValidator(_is_known)]
"""The name of a signal that ends processes."""
