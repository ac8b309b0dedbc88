"""Between a job and its groups: the desired nodes go down whole, what changed about them comes up as edges."""

from __future__ import annotations

from pydantic import Field

from workflows.messages.agents import RankStarts
from workflows.messages.base import Message, ShortText, Time, Vocabulary
from workflows.messages.views import NodeView
from workflows.messages.vocabulary import EvidenceSource, LossCause


class TransitionKind(Vocabulary):
    """What changed about a node."""

    CREATED = "CREATED"
    PENDING = "PENDING"
    JOINED = "JOINED"
    READY = "READY"
    STEPPING = "STEPPING"
    STALLED = "STALLED"
    """Its ranks do not step any more."""
    STALL_ENDED = "GOING_ON"
    """Its ranks step again after a stall."""
    STORE_PORTS = "STORE_PORTS"
    COMMANDED = "COMMANDED"
    """The agent has accepted a world."""
    UNREACHABLE = "UNREACHABLE"
    REACHABLE = "REACHABLE"
    UNRESPONSIVE = "UNRESPONSIVE"
    """A command for the current generation was not taken."""
    LOST = "LOST"
    CREATE_FAILED = "CREATE_FAILED"
    REMOVED = "REMOVED"
    UNKNOWN = "UNKNOWN"
    """Of a newer group: its other fields count."""


class NodeTransition(Message):
    """One change of one node, as its group saw it."""

    kind: TransitionKind
    rank: int
    incarnation: int
    time: Time
    source: EvidenceSource = EvidenceSource.AGENT
    detail: ShortText = ""
    cause: LossCause = LossCause.UNKNOWN
    """Of LOST."""
    queued: bool = False
    """Of PENDING: as in `NodeEvent`."""
    certain: bool = True
    """Of REMOVED: nothing of the node runs any more. False where only its agent could end it and did not answer."""
    generation: int = 0
    entered: int | None = None
    """Of COMMANDED: the newest generation that the node has entered; None where its agent does not say."""
    inquiry: int = 0
    """Of COMMANDED: the newest inquiry that the command followed."""
    entered_at: Time | None = None
    counted: bool = True
    """Of STEPPING: as in `Stepping`."""
    starts: RankStarts | None = None
    store_ports: tuple[int, ...] | None = None
    processes: int | None = None
    address: str | None = None
    host: str | None = None
    command_nodes: str | None = None
    stage: int | None = None
    """Of READY: as in `Ready`."""
    preparing: bool = False
    """Of JOINED and COMMANDED: the node's command works, and has not come to its torchrun yet."""


class GroupTransitions(Message):
    """To the TrainingJob: what changed in one group since its last message."""

    uid: str
    """Of the job's run: a later job of the same name ignores the groups of an earlier one."""
    group: int
    sequence: int
    """Grows with each message, repeats of what could not be delivered included."""
    before: int | None = None
    """Edges of this group that went before the first of these; None from a group that does not count them."""
    transitions: tuple[NodeTransition, ...] = Field(default=(), validation_alias="edges", serialization_alias="edges")
    adopted: tuple[NodeView, ...] | None = None
    """The whole table: the answer to `adopt`, for a job that was reset or replaced."""
    wound_down: bool = False
    """Nothing of the group is left."""
    ownership_epoch: str = Field(default="", validation_alias="tenure", serialization_alias="tenure")
    """Which start or adoption of the group this follows: a reset hands a job its earlier run's signals again, and their
    facts are over."""


class DesiredNode(Message):
    incarnation: int
    token: str
    avoids: tuple[str, ...] = ()
    """Machines that it should avoid."""
    command_restarts: int = 0
    """How often its command is to be started again between two worlds."""


class Member(Message):
    incarnation: int
    """A node that takes a lost member's place is not a member before the next generation."""
    group_rank: int
    """The node's rank in the world: torch's GROUP_RANK."""
    base_rank: int
    """The global rank of the node's first process."""
    processes: int
    restart_command: bool = False
    """Its command did not enter the last world and is started again for this one."""


class World(Message):
    """One generation: who trains together. Constant for all members but for their `Member`."""

    generation: int = Field(ge=1)
    members: dict[int, Member]
    """By node rank (slot)."""
    store_address: str
    store_port: int
    store_rank: int
    """The node (slot) that hosts the store."""
    stage: int = 0
    """The torchrun of the command that it is for, from 0."""

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def processes(self) -> int:
        """torch's WORLD_SIZE."""
        return sum(member.processes for member in self.members.values())


class GroupDesire(Message):
    """To a NodeGroup: all that the job wants of it now. A later one replaces an earlier one."""

    version: int
    """Only ever grows; an older desire that arrives late is ignored."""
    nodes: dict[int, DesiredNode]
    world: World | None = None
    """Only the members of this group matter to it; the rest is counted."""
    world_size: int = 0
    world_nodes: int = 0
    undisturbed: bool = False
    """Nothing is known to be wrong with the world: a node that joins it must not break it."""
    inquiry: int = 0
    """Grows whenever the job asks where members are that it has not heard to step: the world is given to them again."""
    nodes_min: int | None = None
    """The fewest nodes that the job trains with."""
    complete_generation: int = 0
    """Every rank of the world finished this generation: let torchrun leave its exit barrier."""
    stages_complete: int = 0
    """How many torchruns of the command the job has finished."""
    wind_down: bool = False
    """Delete everything and close."""
    reason: str = ""
    """Shown in the Temporal UI on what this desire causes."""


class Adopt(Message):
    """To a NodeGroup that already runs: a job that starts over (reset, or a lost parent) takes it on."""

    job_run_id: str
    ownership_epoch: str = Field(default="", validation_alias="tenure", serialization_alias="tenure")
    """Said back in every `edges` from now on."""
