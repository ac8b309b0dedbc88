"""Limits for each agent, so that one that floods the gateway, or the servers behind it, does not slow down the others.

An agent that stays below them never notices: it sends some ten messages a second at most, and polls with one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from perdure.gateway.recent import Recent

CALLS_PER_SECOND: Final = 50.0
BURST: Final = 200.0
"""Calls at once; an agent that reconnects after an outage sends what it has kept."""
AT_ONCE: Final = 32
"""Calls in progress: the SDK's polls and heartbeats, and signals that wait for a busy server."""
MESSAGE_BYTES: Final = 1024 * 1024
"""The largest message from an agent. Its largest are pieces of a log, of 256 KiB."""

_REMEMBERED: Final = 20_000


class TooMany(Exception):
    """The agent is over its limit."""


class _Share:
    """What one agent has used."""

    def __init__(self, now: float) -> None:
        self.left = BURST
        self.counted_at = now
        self.in_progress = 0


class Limits:
    """Counts the calls of each agent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Creates the counts.

        Args:
            clock: Returns seconds.
        """
        self._clock = clock
        self._shares = Recent[str, _Share](_REMEMBERED)

    @contextmanager
    def one_call(self, node: str) -> Generator[None]:
        """Counts a call of the agent for as long as the context is open.

        Raises:
            TooMany: if it has too many calls, or too many at once.
        """
        now = self._clock()
        share = self._shares.get(node)
        if share is None:
            share = _Share(now)
            self._shares.put(node, share)
        share.left = min(BURST, share.left + (now - share.counted_at) * CALLS_PER_SECOND)
        share.counted_at = now
        if share.left < 1:
            raise TooMany(f"more than {CALLS_PER_SECOND:g} calls a second")
        if share.in_progress >= AT_ONCE:
            raise TooMany(f"more than {AT_ONCE} calls at once")
        share.left -= 1
        share.in_progress += 1
        try:
            yield
        finally:
            share.in_progress -= 1
