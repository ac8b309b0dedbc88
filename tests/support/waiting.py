"""Polls for events in other processes or servers for which a test has no notification.

Events in the test's own process are awaited instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from inspect import isawaitable
from typing import Any, TypeVar, overload

Found = TypeVar("Found")

DEADLINE = 120.0
"""Seconds, for what takes a moment on a machine that is not busy."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
_OF_THE_TIME_WAITED = 0.1

_TURNS = 100
"""More than tasks need to wake each other one after the other."""


@overload
async def eventually(
    condition: Callable[[], Awaitable[Found | None]], *, within: float = ..., what: str | Callable[[], str] = ...
) -> Found: ...
@overload
async def eventually(
    condition: Callable[[], Found | None], *, within: float = ..., what: str | Callable[[], str] = ...
) -> Found: ...
async def eventually(
    condition: Callable[[], Any], *, within: float = DEADLINE, what: str | Callable[[], str] = ""
) -> Any:
    """Returns the condition's first true value.

    Args:
        condition: Looks; it may be a coroutine function.
        within: Seconds.
        what: Said where it does not come true.

    Raises:
        AssertionError: if the condition is not true in time.
    """
    for pause in _pauses(condition, within, what):
        value = condition()
        if isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(pause)
    raise AssertionError


def wait_for(
    condition: Callable[[], Found | None], *, within: float = DEADLINE, what: str | Callable[[], str] = ""
) -> Found:
    """Does what `eventually` does, for tests without an event loop."""
    for pause in _pauses(condition, within, what):
        if value := condition():
            return value
        time.sleep(pause)
    raise AssertionError


async def tasks_wait() -> None:
    """Returns when all tasks of this loop have come to wait for something else than each other."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _pauses(condition: object, within: float, what: str | Callable[[], str]) -> Generator[float]:
    """Yields how long to wait before the next look: as little as the look itself is worth."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) <= within:
        yield min(max(_SHORTEST_PAUSE, waited * _OF_THE_TIME_WAITED), _LONGEST_PAUSE)
    said = what() if callable(what) else what
    raise AssertionError(f"{said or condition}: not within {within:g} s")
