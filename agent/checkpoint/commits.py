"""Commits the checkpoint that the node's group desires, and tries again until the storage has taken it.

The job alone knows when the parts of all nodes are durable; an agent only carries its decision out. Before, it looks
whether the storage still has each part: a checkpoint that cannot be read would take the place of one that can.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from perdure.agent.checkpoint.further_tries import FurtherTries
from perdure.agent.checkpoint.records import lost
from perdure.agent.checkpoint.retention import Retention
from perdure.agent.checkpoint.storage import Storage
from perdure.agent.notifier import Notifier
from perdure.agent.state import AgentState
from perdure.base.backoff import Backoff
from perdure.contract.agents import SnapshotUse
from perdure.contract.checkpoints import Commit

logger = logging.getLogger(__name__)

_ANSWERS_WITHIN = 120.0
"""Seconds after which a storage that has not answered is reported: a commit copies or renames one small file."""
_LISTED_WITHIN = 60.0
"""Seconds after which what a listing lacks is lost: so long may a client of NFS show an older one."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class PartsLost(Exception):
    """The storage has lost what nodes have stored of a checkpoint; the message says what."""


class CheckpointedNode(Protocol):
    """The node whose checkpoints are kept, as its agent knows it."""

    changed: Notifier

    @property
    def state(self) -> AgentState: ...

    def on_snapshots(self, generation: int, use: SnapshotUse) -> None:
        """Records how a checkpointer of this generation keeps its state in memory."""
        ...

    def on_saving(self, generation: int) -> None:
        """Records that a rank of this generation begins to save."""
        ...

    def on_committed(self, commit: Commit) -> None:
        """Records that the node has committed a checkpoint."""
        ...

    def on_awaiting_state(self) -> None:
        """Records that a rank waits for a saved state, which it says again every few seconds."""
        ...


class Commits:
    """Carries out the newest commit that is desired of a node.

    Invariants:
        - Nothing else makes a folder a checkpoint, and a commit that was withdrawn is not carried out.
        - A folder that lacks a part, or a part of whose bytes, does not become a checkpoint.
        - Each problem of a commit is reported once.
    """

    def __init__(
        self,
        storage: Storage,
        retention: Retention,
        node: CheckpointedNode,
        *,
        report: Callable[[Commit, str], None],
        give_up: Callable[[Commit, str], None],
    ) -> None:
        """Creates the object.

        Args:
            storage: The job's storage.
            retention: Deletes what a commit makes superfluous.
            node: The node.
            report: Called in the event loop with a commit and why the storage does not take it, empty if it has.
            give_up: Called in the event loop with a commit that cannot succeed, and why: ranks need not wait for it.
        """
        self._storage = storage
        self._retention = retention
        self._node = node
        self._report = report
        self._give_up = give_up
        self._threads = _one_thread()

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
        backoff, tries = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE), FurtherTries()
        attempt: asyncio.Future[bool] | None = None
        reported, begun = "", time.monotonic()
        while self._due == commit:
            attempt = attempt or asyncio.get_running_loop().run_in_executor(self._threads, self._commit, commit)
            await asyncio.wait({attempt}, timeout=_ANSWERS_WITHIN)
            problem, is_lost = self._problem(attempt)
            if not problem and not attempt.result():
                return
            if not problem:
                self._finish(commit)
            elif problem != reported and not (is_lost and time.monotonic() - begun < _LISTED_WITHIN):
                if is_lost:
                    self._give_up(commit, problem)
                logger.warning("%s is not committed, retrying: %s", commit.checkpoint.folder, problem)
                self._report(commit, problem)
                reported = problem
            if not attempt.done() and tries.is_due():
                # Its thread may wait forever, also with a deletion that is before it.
                attempt.cancel()
                attempt, self._threads = None, _one_thread()
            elif attempt.done():
                attempt = None
                pause = backoff.next_pause()
                await self._node.changed.wait_for(lambda: self._due != commit, within=pause)

    def _commit(self, commit: Commit) -> bool:
        """Commits a checkpoint that the storage has. Returns False if it was withdrawn while its files were listed.

        Raises:
            PartsLost: if it lacks something.
            OSError: if the storage does not answer, or is another one; the libraries of storages raise others.
        """
        if problem := lost(self._storage, commit.checkpoint):
            raise PartsLost(problem)
        if self._due != commit:
            return False
        self._storage.commit(commit.checkpoint)
        return True

    def _problem(self, attempt: asyncio.Future[bool]) -> tuple[str, bool]:
        """Why a checkpoint is not committed, empty if it is; and whether it cannot be."""
        url = self._storage.url
        if not attempt.done():
            return f"{url}: no answer within {_ANSWERS_WITHIN:g} s", False
        error = attempt.exception()
        if isinstance(error, PartsLost):
            return (
                f"{url} lacks what nodes have stored: {error}. Find out whether each node has mounted the same storage "
                "there, and what else deletes or changes files in it, such as another job or a rule of the storage"
            ), True
        if error is None:
            return "", False
        return f"{url}: {getattr(error, 'strerror', None) or error or type(error).__name__}", False

    def _finish(self, commit: Commit) -> None:
        logger.info("%s is a durable checkpoint", commit.checkpoint.folder)
        withdrawn = self._due != commit
        # An agent that ends in between commits again, which changes nothing, and reports again.
        self._report(commit, "")
        self._node.on_committed(commit)
        if withdrawn:
            # The storage was faster than the job's decision: the older ones may be what it goes back to.
            return
        # Not awaited: there may be much to delete, one by one.
        self._threads.submit(self._retention.apply, commit.checkpoint, commit.inherited, kept_before=commit.kept_before)


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="commit")
