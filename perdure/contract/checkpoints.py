"""Durable checkpoints: reports of agents, the job's decisions, and what users see of its checkpoints."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Self

from pydantic import AfterValidator, Field

from perdure.contract.agents import LARGEST_NUMBER, AgentMessage, Steps, Texts
from perdure.contract.base import Message, ShortText, Time, Vocabulary
from perdure.contract.routes import Destination, Route
from perdure.spec.durations import Duration

__all__ = [
    "CheckpointCommitted",
    "CheckpointRef",
    "CheckpointRestored",
    "CheckpointStored",
    "CheckpointView",
    "Commit",
    "HoldRequest",
    "Lookup",
    "MemoryFinding",
    "MemoryOrigin",
    "MemoryProblem",
    "Restore",
    "RestoreSource",
    "StorageFinding",
    "StoredCheckpoint",
]


class RestoreSource(Vocabulary):
    """Where ranks found the state with which they continued."""

    MEMORY = "MEMORY"
    """The memory of their own nodes."""
    PEER = "PEER"
    """The memory of other nodes, for some of the ranks."""
    STORAGE = "STORAGE"
    """The job's storage for checkpoints."""
    NOTHING = "NOTHING"
    """Nowhere: they loaded nothing."""
    UNKNOWN = "UNKNOWN"
    """A source that only a newer release knows."""


class StorageFinding(Vocabulary):
    """What the ranks of a world found in the job's storage for checkpoints."""

    NONE = "NONE"
    """The job has no storage, or none for this state."""
    UNUSED = "UNUSED"
    """They did not look there: the newest state that the job knows was in memory."""
    FOUND = "FOUND"
    """It has checkpoints, and the one that the job knows is among them."""
    EMPTY = "EMPTY"
    """It has no checkpoint, and the job knows of none."""
    LACKS = "LACKS"
    """It lacks the checkpoint that the job has committed last: it is not mounted, or is another one."""
    AWAY = "AWAY"
    """It could not be reached."""
    UNKNOWN = "UNKNOWN"
    """A finding that only a newer release knows."""


class MemoryProblem(Vocabulary):
    """Why what a node has in memory of one rank's state was not loaded."""

    MISSING = "MISSING"
    """It has no snapshot of that rank."""
    DAMAGED = "DAMAGED"
    """The bytes are not the ones that were written."""
    UNREADABLE = "UNREADABLE"
    """It could not be read, as without a free file descriptor."""
    OTHER_WORLD_SIZE = "OTHER_WORLD_SIZE"
    """It is a part of the state of a world of another size."""
    NOT_COMMON = "NOT_COMMON"
    """It is sound, and some rank lacks this step."""
    UNSOUND = "UNSOUND"
    """It may not be sound: a loss that was not a number followed from it, or a rank had computed wrongly."""
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


PLACE = r"(?:[A-Za-z0-9][A-Za-z0-9_.-]{0,63}(?:/[A-Za-z0-9][A-Za-z0-9_.-]{0,63})?)?"
"""The folder of a stage's and a checkpointer's checkpoints, within the storage."""
MOST_PLACES = 16
"""Places in the storage that are named."""
Places = Annotated[
    tuple[Annotated[str, Field(pattern=f"^{PLACE}$")], ...], AfterValidator(lambda places: places[:MOST_PLACES])
]
_RUN = r"[A-Za-z0-9_.-]{1,64}"
_FOLDER = re.compile(rf"(?:({PLACE})/)?step-(\d{{1,18}})-({_RUN})-(\d{{1,18}})")


class CheckpointRef(Message):
    """Names a checkpoint in a job's storage, wherever it is named: a later one is greater."""

    step: int = Field(ge=0, le=LARGEST_NUMBER)
    generation: int = Field(ge=0, le=LARGEST_NUMBER)
    """The generation that saved it."""
    run: str = Field(pattern=f"^{_RUN}$")
    """The job's run that saved it: its uid."""
    place: str = Field(default="", pattern=f"^{PLACE}$")
    """The folder of the checkpointer's and the stage's checkpoints, within the storage."""

    @property
    def folder(self) -> str:
        """The path within the storage."""
        name = f"step-{self.step}-{self.run}-{self.generation}"
        return f"{self.place}/{name}" if self.place else name

    @classmethod
    def parse(cls, folder: str) -> Self:
        """Reads the path of a checkpoint's folder.

        Raises:
            ValueError: if it is none. User code names folders, and must not lead an agent out of the storage.
        """
        match = _FOLDER.fullmatch(folder)
        if match is None:
            raise ValueError(f"folder: expected step-STEP-RUN-GENERATION, found {folder[:120]!r}")
        place, step, run, generation = match.groups()
        return cls(step=int(step), generation=int(generation), run=run, place=place or "")

    def __hash__(self) -> int:
        return hash(self.folder)

    def __lt__(self, other: CheckpointRef) -> bool:
        own, its = (self.step, self.generation), (other.step, other.generation)
        return (*own, self.run, self.place) < (*its, other.run, other.place)


class StoredCheckpoint(Message):
    """What is stored of a checkpoint: by one node, or by all of them."""

    checkpoint: CheckpointRef
    size: int = 0
    """The size of these parts in bytes."""
    took: Duration = timedelta()
    """The longest time of a node from its first rank's request until all its parts were durable."""
    answers: int = 0
    """The number of the newest request for a checkpoint that it answers; 0 for none."""
    beside: Places = ()
    """The places of the checkpointers that are stored, too, and that save in turn with this one."""
    reported: int | None = None
    """The newest step whose loss the ranks had reported when they saved it, where their script counts what it saves
    otherwise, as by epochs. None where it counts both the same."""
    in_memory: bool = False
    """It is in the memory of the nodes, and all ranks of the world wait at it, as `HoldRequest` says; `answers` is the
    number of that request. The node of rank 0 reports it for all."""


class Lookup(Message):
    """What the ranks of a generation looked for, and what they found. None stands for no step."""

    stored: int | None = None
    """The step of the newest checkpoint in the storage that the job knew, and would load."""
    complete: int | None = None
    """The newest step that all ranks of an earlier world had in memory, as far as the nodes remember it."""
    in_memory: int | None = None
    """The newest step that these ranks could load from the memory of their nodes."""
    seen_in_memory: int | None = None
    """The newest step of which a rank's snapshot is in the memory of any node."""
    storage: StorageFinding = StorageFinding.NONE
    in_storage: int | None = None
    """The newest step that the storage has, and that they would load."""
    problem: ShortText = ""
    """Why the storage was not of use."""

    @property
    def newest(self) -> int:
        """The newest step that is known to have existed; below 0 for none."""
        return max(-1 if step is None else step for step in (self.stored, self.complete))

    @property
    def lacks_stored(self) -> bool:
        """Whether the storage is away, or lacks what the job has committed."""
        return self.storage in (StorageFinding.LACKS, StorageFinding.AWAY)


class Restore(Message):
    """With what the ranks of a generation continue: a saved state, or none."""

    step: int
    """0 where they loaded none."""
    source: RestoreSource
    checkpoint: CheckpointRef | None = None
    """The one in storage; None for a snapshot in memory."""
    again: int | None = None
    """The number of steps that were made after it, and are made again; None where that is unknown."""
    distrusted: Steps = ()
    """Newer steps in memory that were not loaded, since the job had failed again after each load."""
    unusable: Texts = ()
    """The checkpoints in the storage, each with its damage, where none of them can be loaded."""
    stops: bool = False
    """The ranks stop: none of those can be loaded, or a newer state than this one is lost and
    `recovery.on_state_loss` is `stop`. Otherwise they continue with it, or start over."""
    memory: Findings = ()
    """What was damaged in memory; where it was not used, also what else was found or missing there."""
    refused: ShortText = ""
    """Why the ranks have not loaded it: only a world of as many ranks as saved it can. They wait for that one; empty
    where they have."""
    of_ranks: int | None = None
    """The number of these ranks; None where they have loaded it."""
    place: str = Field(default="", pattern=f"^{PLACE}$")
    """The place in the storage of the checkpointer whose state it is."""
    lookup: Lookup | None = None
    """What they looked for, and what they found; None where an older release does not say it."""
    waits: bool = False
    """They have loaded nothing yet, and wait for a newer state than the one of this step and source."""
    apart: ShortText = ""
    """How the step differs from that of checkpointers that save the same steps; empty where it does not."""
    reported: int | None = None
    """As in `StoredCheckpoint`, of a state in memory."""


class HoldRequest(Message):
    """A request to have all ranks of a world save one step and wait, since a change that is planned ends them then."""

    number: int
    generation: int
    """The world."""
    resizes: bool = False
    """A world of another size follows: the ranks find out whether it could load the state."""
    copies: bool = False
    """A node leaves: the copies of the step on other nodes are waited for."""
    stores: int = 0
    """The number of the request for a checkpoint that the step answers once it is in the storage, as all nodes end. 0
    where it is kept in memory only."""
    within: Duration = timedelta()
    """The time that this may take; the ranks wait for so much longer."""


class CheckpointStored(AgentMessage, route=Route(Destination.GROUP, "checkpoint_stored")):
    """All parts of a checkpoint that a node has are durable, or cannot be stored yet."""

    stored: StoredCheckpoint
    problem: ShortText = ""
    """Why a part cannot be stored; empty if all are."""


class CheckpointCommitted(AgentMessage, route=Route(Destination.GROUP, "checkpoint_committed", newest_only=True)):
    """The node has committed the checkpoint that its group desires, or cannot yet."""

    checkpoint: CheckpointRef
    problem: ShortText = ""
    """Why the storage does not take it; empty if it has."""


class CheckpointRestored(AgentMessage, route=Route(Destination.GROUP, "checkpoint_restored", newest_only=True)):
    """The ranks of a generation continue with a saved state, start over, or stop. The node of rank 0 reports it."""

    generation: int
    restored: Restore

    @property
    def subject(self) -> str:
        """The checkpointer: a script may have several. What cannot be loaded is kept only if the job learns of it."""
        return f"{self.restored.place}{' unusable' if self.restored.unusable else ''}"


class Commit(Message):
    """A job's decision that a checkpoint is complete. Each is committed once."""

    checkpoint: CheckpointRef
    rank: int
    """The node (slot) that carries it out."""
    interval: Duration | None = None
    """The time until the next checkpoint, where the job chooses it."""
    answers: int = 0
    """The newest request for a checkpoint that it or an earlier one answers; 0 for none."""
    inherited: tuple[CheckpointRef, ...] = ()
    """Those of other runs from which this run has continued: they, and what is older, are the run's to delete."""
    kept_before: int = 0
    """The generation in which the ranks started over, since no checkpoint could be loaded: those of older generations
    are not deleted. 0 where they never did."""


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
    answered: int = 0
    """The number of the newest request for a checkpoint (`perdure checkpoint`) that was answered by a durable one."""
    restored_step: int | None = None
    """The step with which the newest world continued; None where it loaded none by a checkpointer."""
    restored_from: RestoreSource | None = None
    restored_generation: int = 0
    restored_again: int | None = None
    """The number of steps that this world makes again; None where that is unknown."""
