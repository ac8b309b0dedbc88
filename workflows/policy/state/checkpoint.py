"""What a job knows of its checkpoints in storage: see `perdure.workflows.policy.checkpoints.commits`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Self

from perdure.contract import Commit, Message, RestoreSource
from perdure.contract.base import ShortText
from perdure.spec.durations import Duration


class StoredParts(Message):
    """A checkpoint of which some nodes have reported that their parts are durable."""

    folder: str
    step: int
    generation: int
    nodes: tuple[int, ...] = ()
    """The nodes (slots) that have reported."""
    size: int = 0
    took: Duration = timedelta()
    """The longest time of a node."""
    order: int = 0
    """The newest request for a checkpoint that it answers."""

    def replace(self, **fields: object) -> Self:
        return self.model_copy(update=fields)


class DurableCheckpoint(Message):
    """A checkpoint that was committed."""

    folder: str
    step: int
    generation: int
    committed_at: datetime
    size: int = 0
    took: Duration = timedelta()


class LoadedCheckpoint(Message):
    """The stored checkpoint from which the training continued last."""

    folder: str
    step: int
    failed_after: int | None = None
    """The number of counted steps after which the world failed that loaded it before; None for none."""


class CheckpointState(Message):
    """What is known of the job's checkpoints in storage: see `perdure.workflows.policy.checkpoints.commits`."""

    parts: StoredParts | None = None
    """The checkpoint that is being stored."""
    commit: Commit | None = None
    """The decision that it is complete, until it is carried out."""
    commits: int = 0
    """The number of these decisions."""
    durable: DurableCheckpoint | None = None
    """The newest one."""
    orders: int = 0
    """The number of checkpoints that were requested."""
    orders_done: int = 0
    """The newest of these requests that a durable checkpoint answers."""
    problem: ShortText = ""
    """Why the last one could not be stored; empty since one was."""
    problem_since: datetime | None = None
    restored_step: int | None = None
    restored_from: RestoreSource | None = None
    restored_generation: int = 0
    """The newest generation that reported with which step it continued."""
    restored_again: int | None = None
    loaded: LoadedCheckpoint | None = None
    failed_at: int = -1
    """The highest reported step at which the job failed by itself."""
    distrusted: tuple[str, ...] = ()
    """Folders of checkpoints that are not loaded any more: see `perdure.workflows.policy.checkpoints.trust`."""
    inherited: tuple[str, ...] = ()
    """The newest folder of another run from which this run has continued, for each place in the storage."""
    kept_before: int = 0
    """As in `Commit`."""

    def replace(self, **fields: object) -> Self:
        return self.model_copy(update=fields)
