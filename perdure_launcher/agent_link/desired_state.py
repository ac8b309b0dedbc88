"""The desired state that the agent sends the launcher, received in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from ..worlds import World
from .client import LONG_POLL, REQUEST_TIMEOUT, AgentRefused, AgentSession

logger = logging.getLogger(__name__)

_UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class Desired:
    """What the launcher must make true."""

    version: int = _UNKNOWN
    run: bool = False
    attempt: int = 0
    stop_generation: int = 0
    """Ranks of this generation and older ones must not run."""
    world: World | None = None
    exit: bool = False
    exit_grace: timedelta | None = None
    """From SIGTERM to SIGKILL when it leaves; None is the configured one."""
    reason: str = ""

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Desired:
        """Reads the agent's answer.

        Raises:
            KeyError, TypeError, ValueError: if it is none.
        """
        world = cast("dict[str, Any] | None", body.get("world"))
        exit_grace = body.get("exit_grace_s")
        return cls(
            version=int(body["version"]),
            run=bool(body["run"]),
            attempt=int(body["attempt"]),
            stop_generation=int(body.get("stop_generation") or 0),
            world=World.from_json(world) if world and world.get("generation") else None,
            exit=bool(body.get("exit", False)),
            exit_grace=None if exit_grace is None else timedelta(seconds=float(exit_grace)),
            reason=str(body.get("reason") or ""),
        )


class DesiredFeed(threading.Thread):
    """Keeps one question open at the agent: does it want something else?"""

    def __init__(self, session: AgentSession, *, on_change: Callable[[Desired], None]) -> None:
        super().__init__(name="desired", daemon=True)
        self._session = session
        self._on_change = on_change
        self._version = _UNKNOWN

    def forget(self) -> None:
        """Asks for the current version next: a restarted agent may count from the start."""
        self._version = _UNKNOWN

    def run(self) -> None:
        connection = self._session.connect()
        while not self._session.closed:
            try:
                body = self._session.call(connection, "GET", self._question, timeout=LONG_POLL + REQUEST_TIMEOUT)
                if body is None:
                    return
                desired = Desired.from_json(body)
            except (AgentRefused, KeyError, TypeError, ValueError) as error:
                logger.error("the agent's request is not understood: %s: %s", type(error).__name__, error)
                threading.Event().wait(1)
                continue
            if desired.version != self._version:
                self._version = desired.version
                self._on_change(desired)

    def _question(self) -> str:
        return f"/v1/launcher/desired?version={self._version}&wait={LONG_POLL.total_seconds():g}"
