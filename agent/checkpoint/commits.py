"""Commits the checkpoint that the node's group desires, and tries again until the storage has taken it.

The job alone knows when the parts of all nodes are durable; an agent only carries its decision out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from perdure.agent.checkpoint.retention import Retention
from perdure.agent.checkpoint.storage import Storage
from perdure.agent.notifier import Notifier
from perdure.agent.state import AgentState
from perdure.base.backoff import Backoff
from perdure.contract import Commit

logger = logging.getLogger(__name__)

_ANSWERS_WITHIN = 120.0
"""Seconds after which a storage that has not answered is reported: a commit copies or renames one small file."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class CheckpointedNode(Protocol):
    """The node whose checkpoints are kept, as its agent knows it."""

    changed: Notifier

    @property
    def state(self) -> AgentState: ...

    def on_saving(self, generation: int) -> None:
        """Records that a rank of this generation begins to save."""
        ...

    def on_committed(self, commit: Commit) -> None:
        """Records that the node has committed a checkpoint."""
        ...


class Commits:
    """Carries out the newest commit that is desired of a node.

    Invariants:
        - Nothing else makes a folder a checkpoint, and a commit that was withdrawn is not tried again.
        - Each problem of a commit is reported once.
    """

    def __init__(
        self,
        storage: Storage,
        retention: Retention,
        node: CheckpointedNode,
        *,
        report: Callable[[Commit, str], None],
    ) -> None:
        """Creates the object.

        Args:
            storage: The job's storage.
            retention: Deletes what a commit makes superfluous.
            node: The node.
            report: Called in the event loop with a commit and why the storage does not take it, empty if it has.
        """
        self._storage = storage
        self._retention = retention
        self._node = node
        self._report = report
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="commit")

    async def run(self) -> None:
        """Commits until cancelled."""
        while True:
            await self._node.changed.wait_for(lambda: self._due is not None)
            if (commit := self._due) is not None:
                await self._insist(commit)

    @property
    def _due(self) -> Commit | None:
        """The desired commit; None once the storage has taken it."""
        commit, committed = self._node.state.commit, self._node.state.committed
        return (
            None if commit is None or (committed is not None and committed.checkpoint == commit.checkpoint) else commit
        )

    async def _insist(self, commit: Commit) -> None:
        """Tries to commit for as long as that is desired."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        attempt: asyncio.Future[None] | None = None
        reported = ""
        while self._due == commit:
            attempt = attempt or asyncio.get_running_loop().run_in_executor(
                self._threads, self._storage.commit, commit.checkpoint
            )
            await asyncio.wait({attempt}, timeout=_ANSWERS_WITHIN)
            problem = self._problem(attempt)
            if not problem:
                self._finish(commit)
            elif problem != reported:
                logger.warning("%s is not committed, retrying: %s", commit.checkpoint.folder, problem)
                self._report(commit, problem)
                reported = problem
            if attempt.done():
                attempt = None
                pause = backoff.next_pause()
                await self._node.changed.wait_for(lambda: self._due != commit, within=pause)

    def _problem(self, attempt: asyncio.Future[None]) -> str:
        """Why a checkpoint is not committed; empty if it is."""
        if not attempt.done():
            return f"{self._storage.url}: no answer within {_ANSWERS_WITHIN:g} s"
        if (error := attempt.exception()) is None:
            return ""
        return f"{self._storage.url}: {getattr(error, 'strerror', None) or error or type(error).__name__}"

    def _finish(self, commit: Commit) -> None:
        logger.info("%s is a durable checkpoint", commit.checkpoint.folder)
        # An agent that ends in between commits again, which changes nothing, and reports again.
        self._report(commit, "")
        self._node.on_committed(commit)
        # Not awaited: there may be much to delete, one by one.
        self._threads.submit(self._retention.apply, commit.checkpoint, commit.inherited, kept_before=commit.kept_before)
