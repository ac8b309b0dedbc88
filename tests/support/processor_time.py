"""Calls a function in a process of its own, which the kernel ends once it has used too much processor time."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from typing import Any


def ends_within(seconds: int, function: Callable[..., object], *arguments: Any) -> bool:
    """Whether a call ends, and raises nothing, within seconds of processor time: a busy machine makes no difference."""
    process = multiprocessing.get_context("fork").Process(target=_call, args=(seconds, function, *arguments))
    process.start()
    process.join()
    return process.exitcode == 0


def _call(seconds: int, function: Callable[..., object], *arguments: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    function(*arguments)
