"""Durable checkpoints: reports of agents, commands to them, and what a job knows of its checkpoints."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator

from perdure.contract.agents import AgentMessage, Steps, Texts
from perdure.contract.base import Message, ShortText, Time, Vocabulary
from perdure.contract.identity import NodeCredentials
from perdure.contract.routes import Destination, Route
from perdure.spec.durations import Duration

__all__ = [
    "CheckpointFacts",
    "CheckpointRestored",
    "CheckpointStored",
    "CheckpointView",
    "Commit",
    "CommitCheckpoint",
    "MemoryFinding",
    "MemoryOrigin",
    "MemoryProblem",
    "OrderCheckpoint",
    "RestoreSource",
]


class RestoreSource(Vocabulary):
    """Where ranks found the state with which they continued."""

    MEMORY = "MEMORY"
    """The memory of their own nodes."""
    PEER = "PEER"
    """The memory of other nodes, for some of the ranks."""
    STORAGE = "STORAGE"
    """The job's storage for checkpoints."""
    UNKNOWN = "UNKNOWN"
    """A source that only a newer release knows."""


class MemoryProblem(Vocabulary):
    """Why what a node has in memory of one rank's state was not loaded."""

    MISSING = "MISSING"
    """It has no snapshot of that rank."""
    DAMAGED = "DAMAGED"
    """The bytes are not the ones that were written."""
    OTHER_WORLD_SIZE = "OTHER_WORLD_SIZE"
    """It is a part of the state of a world of another size."""
    NOT_COMMON = "NOT_COMMON"
    """It is sound, and some rank lacks this step."""
    NO_ROOM = "NO_ROOM"
    """The node has no room for the snapshot that another node would send."""
    UNKNOWN = "UNKNOWN"
    """A reason that only a newer release knows."""


class MemoryOrigin(Vocabulary):
    """Where a node's memory folder comes from."""

    ADOPTED = "ADOPTED"
    """A killed launcher of the same node left it on the machine."""
    NEW = "NEW"
    """It began empty: no launcher of the node had left one on the machine."""
    HELD = "HELD"
    """It began empty: another process still had the one that the node's last launcher left."""
    UNKNOWN = "UNKNOWN"
    """An origin that only a newer release knows."""


MOST_FINDINGS = 20
"""Findings of one restore that are reported."""


class MemoryFinding(Message):
    """Why what one node has in memory of one rank's state was not loaded."""

    rank: int
    """The rank whose state it is."""
    node: int | None = None
    """The node (slot) whose memory it is; None where that is unknown."""
    problem: MemoryProblem
    steps: Steps = ()
    """The snapshots' steps, the newest first."""
    origin: MemoryOrigin | None = None
    """Where the memory folder of a node without a snapshot comes from; None where that is unknown."""


Findings = Annotated[tuple[MemoryFinding, ...], AfterValidator(lambda findings: findings[:MOST_FINDINGS])]


class CheckpointStored(AgentMessage, route=Route(Destination.GROUP, "checkpoint_stored")):
    """All parts of a checkpoint that a node has are durable, or cannot be stored yet; or none of the stored ones can be
    loaded."""

    generation: int
    """The generation that saved it."""
    step: int
    folder: ShortText
    """The checkpoint's path within the storage."""
    size: int = 0
    """The size of the node's parts in bytes."""
    took: Duration = timedelta()
    """The time from the first rank's request until all was durable."""
    problem: ShortText = ""
    """Why a part cannot be stored; empty if all are."""
    order: int = 0
    """The number of the newest request for a checkpoint that it answers; 0 for none."""
    unusable: Texts = ()
    """The checkpoints in the storage, each with its damage, where none of them can be loaded: the ranks stop."""


class CheckpointRestored(AgentMessage, route=Route(Destination.GROUP, "checkpoint_restored", newest_only=True)):
    """The ranks of a generation continue with a saved state, or start over although there are some. The node of
    rank 0 reports it."""

    generation: int
    step: int
    source: RestoreSource
    folder: ShortText = ""
    """The checkpoint's path within the storage; empty for a snapshot in memory."""
    again: int | None = None
    """The number of steps that were made after it, and are made again; None where that is unknown."""
    distrusted: Steps = ()
    """Newer steps in memory that were not loaded, since the job had failed again after each load."""
    unusable: Texts = ()
    """The checkpoints in the storage, each with its damage, where none of them can be loaded: the ranks start over."""
    memory: Findings = ()
    """What was damaged in memory; where it was not used, also what else was found or missing there."""


class CheckpointFacts(Message):
    """What a transition says about a checkpoint."""

    step: int
    folder: ShortText = ""
    size: int = 0
    took: Duration = timedelta()
    problem: ShortText = ""
    order: int = 0
    unusable: Texts = ()
    source: RestoreSource = RestoreSource.UNKNOWN
    again: int | None = None
    distrusted: tuple[int, ...] = ()
    memory: Findings = ()


class Commit(Message):
    """A job's decision that a checkpoint is complete."""

    number: int
    """Grows with each decision."""
    rank: int
    """The node (slot) that carries it out."""
    generation: int
    step: int
    folder: ShortText
    interval: Duration | None = None
    """The time until the next checkpoint, where the job chooses it."""
    order: int = 0
    """The newest request for a checkpoint that it answers; 0 for none."""
    inherited: tuple[ShortText, ...] = ()
    """The folders of other runs from which this run has continued: they, and what is older, are the run's to delete."""
    kept_before: int = 0
    """The generation in which the ranks started over, since no checkpoint could be loaded: those of older generations
    are not deleted. 0 where they never did."""


class CommitCheckpoint(Message):
    """Argument of `commit_checkpoint`: make the parts in this folder a checkpoint."""

    node: NodeCredentials
    generation: int
    folder: str
    interval: Duration | None = None
    order: int = 0
    """The newest request for a checkpoint that it answers; 0 for none."""
    inherited: tuple[str, ...] = ()
    """As in `Commit`."""
    kept_before: int = 0
    """As in `Commit`."""


class OrderCheckpoint(Message):
    """Argument of `order_checkpoint`: have the ranks make a checkpoint now."""

    node: NodeCredentials
    number: int
    """Grows with each request of a job."""


class CheckpointView(Message):
    """The durable checkpoints of a job, as `status` shows them."""

    url: str = ""
    """The storage; empty where the job has none."""
    step: int | None = None
    """The newest durable checkpoint's step; None where there is none of this run."""
    folder: str = ""
    """Its path within the storage."""
    committed_at: Time | None = None
    size: int = 0
    """Its size in bytes."""
    took: Duration | None = None
    """The time from its snapshot until it was durable."""
    problem: ShortText = ""
    """Why the last checkpoint could not be stored; empty since one was."""
    problem_since: Time | None = None
    order: int = 0
    """The number of the newest request for a checkpoint (`perdure checkpoint`) that was answered by a durable one."""
    restored_step: int | None = None
    """The step with which the newest world continued; None where it loaded none by a checkpointer."""
    restored_from: RestoreSource | None = None
    restored_generation: int = 0
    restored_again: int | None = None
    """The number of steps that this world makes again; None where that is unknown."""
