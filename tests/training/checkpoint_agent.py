"""The agent's part in checkpoints in a thread, with a control plane that commits what is complete."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.agent.checkpoint.keeper import Checkpoints
from perdure.agent.config import AgentConfig
from perdure.agent.state import AgentState
from perdure.contract import (
    AgentMessage,
    CheckpointRestored,
    CheckpointStored,
    CommitCheckpoint,
    CopyHolder,
    HoldCopies,
    NodeCredentials,
    OrderCheckpoint,
)
from perdure.spec.checkpoint import Checkpoint
from perdure.workflows.policy.checkpoints.copies import copies_token
from perdure_training.node_api.bodies import World

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
        self.distrusted: tuple[str, ...] = ()
        """The folders that the job distrusts."""
        self.kept_before = 0
        """The generation in which the ranks started over."""
        self.inherited: tuple[str, ...] = ()
        """The folders of other runs from which the run has continued."""
        self.saving: list[int] = []
        """The generations of ranks that have begun to save."""
        self._checkpoint = Checkpoint(storage=storage, **checkpoint)
        self._loop = asyncio.new_event_loop()
        self._commands: set[asyncio.Task[Any]] = set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
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
        self.checkpoints = Checkpoints(config, state=self._state, saving=self.saving.append, to_group=self._take)

        async def start() -> None:
            self.checkpoints.start()

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(30)

    def hold_copies(self, holder: CheckpointAgent) -> None:
        """The group says which node keeps this one's copies."""
        receiver = holder.checkpoints.receiver
        assert receiver is not None
        command = HoldCopies(
            node=self.node,
            holder=CopyHolder(
                rank=holder.node.rank,
                incarnation=holder.node.incarnation,
                address="127.0.0.1",
                port=receiver.port,
                folder=receiver.folder,
                token=copies_token(holder.node.token, role=self.node.role, rank=self.node.rank),
            ),
        )
        assert self.checkpoints.hold_copies(command).accepted

    def begin(self, generation: int) -> None:
        """A newer world reaches the node."""
        self.generation = generation

    def commit(self, stored: CheckpointStored) -> None:
        command = self._commit_of(stored)
        asyncio.run_coroutine_threadsafe(self.checkpoints.commit(command), self._loop).result(60)

    def order(self, number: int) -> None:
        """A user requests a checkpoint."""
        assert self.checkpoints.order(OrderCheckpoint(node=NODE, number=number)).accepted

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def problems(self) -> list[str]:
        return [message.problem for message in self.of(CheckpointStored) if message.problem]

    @property
    def environment(self) -> dict[str, str]:
        return {"PERDURE_PROGRESS_DIR": str(self.run_dir / "progress")}

    def _state(self) -> AgentState:
        world = World(
            generation=self.generation,
            nodes=1,
            group_rank=0,
            base_rank=0,
            world_size=self.ranks,
            store_address="127.0.0.1",
            store_port=1,
            store_host=True,
        )
        return AgentState(world=world, processes=self.ranks, distrusted_checkpoints=self.distrusted)

    def _take(self, message: AgentMessage) -> None:
        self.messages.append(message)
        if isinstance(message, CheckpointRestored) and message.unusable:
            self.kept_before = message.generation
        if self.commits and isinstance(message, CheckpointStored) and not message.problem:
            task = self._loop.create_task(self.checkpoints.commit(self._commit_of(message)))
            self._commands.add(task)
            task.add_done_callback(self._commands.discard)

    def _commit_of(self, stored: CheckpointStored) -> CommitCheckpoint:
        return CommitCheckpoint(
            node=NODE,
            generation=stored.generation,
            folder=stored.folder,
            order=stored.order,
            inherited=self.inherited,
            kept_before=self.kept_before,
        )


@contextmanager
def checkpoint_agent(storage: Path | str, *, ranks: int = 1, **checkpoint: Any) -> Iterator[CheckpointAgent]:
    """An agent that serves until the process ends."""
    # The path of a socket is short.
    with tempfile.TemporaryDirectory() as folder:
        yield CheckpointAgent(Path(folder), str(storage), ranks=ranks, **checkpoint)
