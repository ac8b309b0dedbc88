"""The desired state that the agent sends the launcher, received in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from perdure_training.node_api.agent_client import AgentRefused
from perdure_training.node_api.bodies import Desired
from perdure_training.node_api.codec import Malformed, decode

from .session import LONG_POLL, LONG_POLL_TIMEOUT, AgentSession

logger = logging.getLogger(__name__)

_UNKNOWN = -1

NOTHING_DESIRED = Desired(version=_UNKNOWN, run=False, attempt=0)
"""The state before the agent's first answer."""


class DesiredFeed(threading.Thread):
    """Polls the agent for changes of the desired state, with one long poll at a time."""

    def __init__(self, session: AgentSession, *, on_change: Callable[[Desired], None]) -> None:
        super().__init__(name="desired", daemon=True)
        self._session = session
        self._on_change = on_change
        self._version = _UNKNOWN

    def forget(self) -> None:
        """Requests the current version next: a restarted agent may count from the start."""
        self._version = _UNKNOWN

    def run(self) -> None:
        connection = self._session.connect()
        while not self._session.closed:
            try:
                body = self._session.call(connection, "GET", self._question, within=LONG_POLL_TIMEOUT)
                if body is None:
                    return
                desired = decode(Desired, body)
            except (AgentRefused, Malformed) as error:
                logger.error("the agent's desired state is malformed: %s: %s", type(error).__name__, error)
                threading.Event().wait(1)
                continue
            if desired.version != self._version:
                self._version = desired.version
                self._on_change(desired)

    def _question(self) -> str:
        return f"/v1/launcher/desired?version={self._version}&wait={LONG_POLL:g}"
