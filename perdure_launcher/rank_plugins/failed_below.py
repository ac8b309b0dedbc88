"""Looks through errors with which launchers end: they only say that a process which they have started failed.

A program may start its ranks by torchrun, `mp.spawn` or another command. How and why one of them failed is the cause;
the launcher's own exception, always the same one at the same line, says nothing.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, cast

_DEEPEST_CAUSE = 8
_BEFORE_A_TRACEBACK = "terminated with the following error:\n"
"""What `mp.spawn` writes before the traceback of the process that it had started."""


@dataclass(frozen=True)
class FailedBelow:
    """The failure of a process that a launcher had started."""

    status: int | None = None
    """Its exit code, or its signal with a minus; None where the launcher does not tell it."""
    error: str | None = ""
    """Its exception, or who it was; empty where the launcher tells neither, and None where the launcher's own exception
    says more."""
    traceback: str = ""


def failed_below(error: BaseException) -> FailedBelow | None:
    """Returns the failure that an exception of a launcher reports; None for any other exception.

    Args:
        error: The exception that ends a process. Launchers' own may be the cause of another one.
    """
    cause: BaseException | None = error
    for _ in range(_DEEPEST_CAUSE):
        if cause is None:
            return None
        looked_through = _LAUNCHERS.get(type(cause).__name__)
        if looked_through is not None:
            return looked_through(cause)
        cause = cause.__cause__
    return None


def _of_torchrun(error: Any) -> FailedBelow | None:
    failures = list(getattr(error, "failures", {}).values())
    if not failures:
        return None
    # torchrun has ended the others by SIGTERM; those of a killed rank fail because they have lost it.
    first = min(
        failures, key=lambda one: (one.exitcode == -signal.SIGTERM, one.exitcode != -signal.SIGKILL, one.timestamp)
    )
    if first.exitcode < 0:
        name = (
            f"rank {next(rank for rank, one in error.failures.items() if one is first)} of the command's own torchrun"
        )
        return FailedBelow(status=first.exitcode, error=f"{name}, process {first.pid}")
    # Its error file, of a rank that is a function; else a text without content.
    told = cast("dict[str, Any]", first.message) if isinstance(first.message, dict) else {}
    callstack = told.get("extraInfo", {}).get("py_callstack", "")
    return FailedBelow(status=first.exitcode, error=str(told.get("message", "")), traceback=str(callstack))


def _of_an_exit(error: Any) -> FailedBelow:
    code = error.exit_code
    return FailedBelow(status=code, error=f"process {error.error_pid} of mp.spawn" if code < 0 else "")


def _of_an_exception(error: Any) -> FailedBelow | None:
    _, found, trace = str(error).partition(_BEFORE_A_TRACEBACK)
    lines = [line for line in trace.splitlines() if line and not line[0].isspace()]
    return FailedBelow(error=lines[-1], traceback=trace) if found and lines else FailedBelow(error=None)


def _of_a_command(error: Any) -> FailedBelow:
    # An exit code of its own says less than the exception's text, which has the command.
    code = error.returncode
    return (
        FailedBelow(status=code, error="a command that the rank had started") if code < 0 else FailedBelow(error=None)
    )


_LAUNCHERS = {
    "ChildFailedError": _of_torchrun,
    "ProcessExitedException": _of_an_exit,
    "ProcessRaisedException": _of_an_exception,
    "CalledProcessError": _of_a_command,
}
"""By the names of the exceptions, whose modules are not imported for this."""
