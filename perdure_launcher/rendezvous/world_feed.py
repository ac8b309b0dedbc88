"""Receives worlds from the agent in the background, so that torchrun's main thread never waits for a socket."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from perdure_training.node_api.agent_client import AgentRefused
from perdure_training.node_api.bodies import World, WorldAnswer
from perdure_training.node_api.codec import Malformed, decode

from ..agent_link.session import LONG_POLL, LONG_POLL_TIMEOUT, AgentSession

logger = logging.getLogger(__name__)


class WorldFeed(threading.Thread):
    """Polls the agent for newer worlds and complete generations, with one long poll at a time."""

    def __init__(self, session: AgentSession, *, after: int, stage: int, prepare: Callable[[World], None]) -> None:
        """Creates the feed.

        Args:
            session: The session with the agent.
            after: The newest known generation; only newer ones are requested.
            stage: The index of this torchrun in its command, from 0.
            prepare: Called with each new world before any other thread receives it, in the feed's thread.
        """
        super().__init__(name="worlds", daemon=True)
        self._session = session
        self._prepare = prepare
        self._known = after
        self._stage = stage
        self._stages_complete = 0
        self._newest: World | None = None
        self._complete = 0
        self._changed = threading.Condition()

    @property
    def newest(self) -> World | None:
        with self._changed:
            return self._newest

    def newer_than(self, generation: int) -> World | None:
        """Returns the newest world if it is newer than this generation."""
        world = self.newest
        return world if world is not None and world.generation > generation else None

    @property
    def stage_is_complete(self) -> bool:
        """Whether the job has finished this torchrun's stage, so that there will be no world for it."""
        with self._changed:
            return self._stages_complete > self._stage

    def wait_newer(self, generation: int) -> World | None:
        """Waits for a newer world without a time limit; a signal handler may end the wait by raising.

        Returns:
            The world; None if the job has finished this stage.
        """
        with self._changed:
            while self._stages_complete <= self._stage:
                if self._newest is not None and self._newest.generation > generation:
                    return self._newest
                self._changed.wait()
            return None

    def wait_complete(self, generation: int) -> bool:
        """Waits until the generation is complete (returns True), or a newer world has replaced it (returns False)."""
        with self._changed:
            while self._complete < generation:
                if self._newest is not None and self._newest.generation > generation:
                    return False
                self._changed.wait()
            return True

    def run(self) -> None:
        connection = self._session.connect()
        while not self._session.closed:
            try:
                body = self._session.call(connection, "GET", self._question, within=LONG_POLL_TIMEOUT)
                if body is not None:
                    self._receive(decode(WorldAnswer, body))
            except (AgentRefused, Malformed) as error:
                logger.error("the agent's answer about worlds is not understood: %s: %s", type(error).__name__, error)
                threading.Event().wait(1)

    def _question(self) -> str:
        known = f"after={self._known}&complete={self._complete}&stage={self._stage}&stages={self._stages_complete}"
        return f"/v1/rendezvous/world?{known}&wait={LONG_POLL:g}"

    def _receive(self, answer: WorldAnswer) -> None:
        world = answer.world
        if world is not None and world.generation <= self._known:
            world = None
        if world is not None:
            self._prepare(world)
        with self._changed:
            self._complete = max(self._complete, answer.complete)
            self._stages_complete = max(self._stages_complete, answer.stages_complete)
            if world is not None:
                self._known = world.generation
                self._newest = world
            self._changed.notify_all()
