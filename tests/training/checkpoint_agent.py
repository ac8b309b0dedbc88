"""The agent's part in checkpoints in a thread, with a control plane that commits what is complete."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.agent.checkpoint.connections import CheckpointSocket
from perdure.agent.checkpoint.keeper import CheckpointService
from perdure.agent.config import AgentConfig
from perdure.agent.notifier import Notifier
from perdure.agent.state import AgentState
from perdure.contract import (
    AgentMessage,
    CheckpointCommitted,
    CheckpointRef,
    CheckpointRestored,
    CheckpointStored,
    Commit,
    CopyTarget,
    HoldRequest,
    NodeCredentials,
    Restore,
    RestoreSource,
    SnapshotUse,
)
from perdure.spec.checkpoint import Checkpoint
from perdure.workflows.policy.checkpoints.copies import copies_token
from perdure_training.node_api.bodies import UnsoundSteps, World

NODE = NodeCredentials(uid="run", role="worker", rank=0, incarnation=1, token="secret")


class CheckpointAgent:
    """An agent without Temporal. Where `commits` is set, it commits a checkpoint when its own ranks have stored it."""

    def __init__(
        self,
        run_dir: Path,
        storage: str | None,
        *,
        ranks: int = 1,
        state_dir: Path | None = None,
        node: NodeCredentials = NODE,
        copies_dir: Path | None = None,
        **checkpoint: Any,
    ) -> None:
        self.run_dir = run_dir
        self.node = node
        self.copies_dir = copies_dir
        self._state_dir = state_dir
        self.ranks = ranks
        self.commits = True
        self.messages: list[AgentMessage] = []
        self.generation = 0
        self.distrusted: tuple[CheckpointRef, ...] = ()
        """Those that the job distrusts."""
        self.unsound: UnsoundSteps | None = None
        """What the job does not load because its loss was not a number."""
        self.kept_before = 0
        """The generation in which the ranks started over."""
        self.inherited: tuple[CheckpointRef, ...] = ()
        """Those of other runs from which the run has continued."""
        self.saving: list[int] = []
        """The generations of ranks that have begun to save."""
        self.awaited_state = 0
        """How often ranks have said that they wait for a state."""
        self.requested = 0
        """The newest request of a user for a checkpoint."""
        self.hold: HoldRequest | None = None
        """The job has all ranks wait at a step."""
        self.uses: list[tuple[int, SnapshotUse]] = []
        """How ranks keep their state in memory, with their generation."""
        self.copies: CopyTarget | None = None
        self.desired_commit: Commit | None = None
        self.committed: Commit | None = None
        self.changed = Notifier()
        self._checkpoint = Checkpoint(storage=storage, **checkpoint)
        self._loop = asyncio.new_event_loop()
        self._serving: Future[None] | None = None
        self._sockets: list[CheckpointSocket] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        (run_dir / "progress").mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        """Starts an agent, which takes the place of the one before."""
        config = AgentConfig(
            node=self.node,
            copies_dir=self.copies_dir,
            job_id="job/a/b",
            job_first_run_id="first",
            group_id="group",
            task_queue="queue",
            address="127.0.0.1",
            nodes="1",
            run_dir=self.run_dir,
            state_dir=self._state_dir,
            checkpoint=self._checkpoint,
        )
        if self._serving is not None:
            self._serving.cancel()
        self.checkpoints = CheckpointService(config, self, to_group=self._take)
        self._in_loop(self.checkpoints.start)
        self._sockets.append(self.checkpoints._socket)
        self._serving = asyncio.run_coroutine_threadsafe(self.checkpoints.run(), self._loop)

    def close(self) -> None:
        """Ends all agents."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self.checkpoints.close()
        for one in self._sockets:
            one.close()

    def hold_copies(self, holder: CheckpointAgent) -> None:
        """The group says which node keeps this one's copies."""
        receiver = holder.checkpoints.receiver
        assert receiver is not None
        self.copies = CopyTarget(
            rank=holder.node.rank,
            incarnation=holder.node.incarnation,
            address="127.0.0.1",
            port=receiver.port,
            folder=receiver.folder,
            token=copies_token(holder.node.token, role=self.node.role, rank=self.node.rank),
        )
        self._in_loop(self.checkpoints.follow)

    def begin(self, generation: int) -> None:
        """A newer world reaches the node."""
        self.generation = generation

    def commit(self, stored: CheckpointStored) -> None:
        """The job decides that a checkpoint is complete."""
        self._in_loop(lambda: self._desire_commit(stored))

    def request_checkpoint(self, number: int) -> None:
        """A user requests a checkpoint."""
        self.requested = number
        self._in_loop(self.checkpoints.follow)

    def request_hold(self, hold: HoldRequest | None) -> None:
        """The job has all ranks wait at a step, or no longer."""
        self.hold = hold
        self._in_loop(self.checkpoints.follow)

    def of(self, kind: type) -> list[Any]:
        """The reports of a kind, with those of requests that were answered: a report may follow the answer."""
        if not self._loop.is_closed():
            self._in_loop(lambda: None)
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def restores(self) -> list[Restore]:
        """With what the ranks have continued, where they have loaded something."""
        return [one for one in self.searches if one.source is not RestoreSource.NOTHING and not one.waits]

    @property
    def searches(self) -> list[Restore]:
        """All that the ranks have reported of their search for a state."""
        return [message.restored for message in self.of(CheckpointRestored)]

    @property
    def problems(self) -> list[str]:
        return [message.problem for message in self.of(CheckpointStored) if message.problem]

    @property
    def commit_problems(self) -> list[str]:
        return [message.problem for message in self.of(CheckpointCommitted) if message.problem]

    @property
    def environment(self) -> dict[str, str]:
        return {"PERDURE_PROGRESS_DIR": str(self.run_dir / "progress")}

    @property
    def state(self) -> AgentState:
        world = World(
            generation=self.generation,
            nodes=1,
            group_rank=0,
            base_rank=0,
            world_size=self.ranks,
            store_address="127.0.0.1",
            store_port=1,
            store_host=True,
            unsound=self.unsound,
        )
        return AgentState(
            world=world,
            processes=self.ranks,
            distrusted_checkpoints=self.distrusted,
            checkpoint_request=self.requested,
            hold=self.hold,
            copies=self.copies,
            commit=self.desired_commit,
            committed=self.committed,
        )

    def on_saving(self, generation: int) -> None:
        self.saving.append(generation)

    def on_snapshots(self, generation: int, use: SnapshotUse) -> None:
        self.uses.append((generation, use))

    def on_awaiting_state(self) -> None:
        self.awaited_state += 1

    def on_committed(self, commit: Commit) -> None:
        self.committed = commit
        self.changed.fire()

    def _take(self, message: AgentMessage) -> None:
        self.messages.append(message)
        if isinstance(message, CheckpointRestored) and message.restored.unusable and not message.restored.stops:
            self.kept_before = message.generation
        if isinstance(message, CheckpointStored) and self.commits and not (message.stored.in_memory or message.problem):
            self._desire_commit(message)

    def _desire_commit(self, message: CheckpointStored) -> None:
        self.desired_commit = Commit(
            checkpoint=message.stored.checkpoint,
            rank=self.node.rank,
            answers=message.stored.answers,
            inherited=self.inherited,
            kept_before=self.kept_before,
        )
        self.changed.fire()

    def _in_loop(self, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(30)


@contextmanager
def checkpoint_agent(storage: Path | str, *, ranks: int = 1, **checkpoint: Any) -> Iterator[CheckpointAgent]:
    """An agent that serves until the context ends."""
    # The path of a socket is short.
    with tempfile.TemporaryDirectory() as folder:
        agent = CheckpointAgent(Path(folder), str(storage), ranks=ranks, **checkpoint)
        try:
            yield agent
        finally:
            agent.close()
