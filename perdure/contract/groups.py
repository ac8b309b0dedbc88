"""Messages between a job and its groups: a job sends its whole desired state, a group sends transitions of nodes."""

from __future__ import annotations

from pydantic import Field

from perdure.contract.agents import RankStarts
from perdure.contract.base import Message, ShortText, Time, Vocabulary
from perdure.contract.checkpoints import CheckpointFacts, Commit
from perdure.contract.identity import Incarnation
from perdure.contract.views import NodeView
from perdure.contract.vocabulary import EvidenceSource, LossCause
from perdure.spec.durations import Duration

__all__ = [
    "Adopt",
    "DesiredNode",
    "GroupDesire",
    "GroupTransitions",
    "Member",
    "NodeTransition",
    "TransitionKind",
    "World",
]


class TransitionKind(Vocabulary):
    """Kinds of changes of a node."""

    CREATED = "CREATED"
    PENDING = "PENDING"
    JOINED = "JOINED"
    READY = "READY"
    STEPPING = "STEPPING"
    STALLED = "STALLED"
    """Its ranks have stopped stepping."""
    STALL_ENDED = "STALL_ENDED"
    """Its ranks step again after a stall."""
    STORE_PORTS = "STORE_PORTS"
    COMMANDED = "COMMANDED"
    """The agent has accepted a world."""
    UNREACHABLE = "UNREACHABLE"
    REACHABLE = "REACHABLE"
    UNRESPONSIVE = "UNRESPONSIVE"
    """The agent did not take a command for the current generation."""
    LOST = "LOST"
    CREATE_FAILED = "CREATE_FAILED"
    REMOVED = "REMOVED"
    CHECKPOINT_STORED = "CHECKPOINT_STORED"
    """The node's parts of a checkpoint are durable, or cannot be stored."""
    CHECKPOINT_COMMITTED = "CHECKPOINT_COMMITTED"
    """The node has carried out the job's decision that a checkpoint is complete, or cannot."""
    CHECKPOINT_RESTORED = "CHECKPOINT_RESTORED"
    """The world continues with a saved step."""
    ENDING = "ENDING"
    """The node is being ended from outside, and waits for a checkpoint."""
    UNKNOWN = "UNKNOWN"
    """A kind that only a newer group knows; its other fields count."""


class NodeTransition(Incarnation):
    """One change of one node, as its group saw it."""

    kind: TransitionKind
    time: Time
    source: EvidenceSource = EvidenceSource.AGENT
    detail: ShortText = ""
    cause: LossCause = LossCause.UNKNOWN
    """Why a LOST node was lost."""
    queued: bool = False
    """Set with PENDING only, as in `NodeEvent`."""
    absent: bool = False
    """Set with PENDING only, as in `NodeEvent`."""
    certain: bool = True
    """Set with REMOVED only: no process of the node runs any more. False where only its agent could end it and did not
    answer."""
    generation: int = 0
    entered: int | None = None
    """Set with COMMANDED only: the newest generation that the node has entered; None where its agent does not report
    it."""
    inquiry: int = 0
    """Set with COMMANDED only: the newest inquiry that the command answers."""
    entered_at: Time | None = None
    counted: bool = True
    """Set with STEPPING only, as in `Stepping`."""
    at_start: bool = False
    """Set with STALLED only, as in `Stall`."""
    starts: RankStarts | None = None
    saves: bool | None = None
    """Set with STEPPING only, as in `Stepping`."""
    store_ports: tuple[int, ...] | None = None
    processes: int | None = None
    address: str | None = None
    host: str | None = None
    command_nodes: str | None = None
    stage: int | None = None
    """Set with READY only, as in `Ready`."""
    preparing: bool = False
    """Set with JOINED and COMMANDED only: the node's command runs, and has not started its torchrun yet."""
    waits: ShortText | None = None
    """Set with JOINED only, where that has changed: what the node's command waits for before it starts."""
    checkpoint: CheckpointFacts | None = None
    """Set with the kinds of checkpoints only."""


class GroupTransitions(Message):
    """To the TrainingJob: the changes in one group since its last message."""

    uid: str
    """The job run's uid: a later job of the same name ignores the groups of an earlier one."""
    group: int
    sequence: int
    """Grows with each message, including a message that repeats an undelivered one."""
    before: int | None = None
    """The number of this group's transitions before the first of these; None from a group that does not count them."""
    transitions: tuple[NodeTransition, ...] = ()
    adopted: tuple[NodeView, ...] | None = None
    """The whole table: the answer to `adopt`, for a job that was reset or replaced."""
    wound_down: bool = False
    """The group has deleted all its nodes and closes."""
    ownership_epoch: str = ""
    """Identifies the start or adoption of the group that this message follows. A job that was reset receives its
    earlier run's signals again, and recognizes them as stale by it."""


class DesiredNode(Message):
    incarnation: int
    token: str = Field(repr=False)
    avoids: tuple[str, ...] = ()
    """Machines that the node should avoid."""
    command_restarts: int = 0
    """The number of restarts of its command between two worlds that the job has requested."""
    released: bool = False
    """It is being ended from outside, and need not wait for a checkpoint any longer."""


class Member(Message):
    incarnation: int
    """A node that takes a lost member's place is not a member before the next generation."""
    group_rank: int
    """The node's rank in the world: torch's GROUP_RANK."""
    base_rank: int
    """The global rank of the node's first process."""
    processes: int
    restart_command: bool = False
    """Its command did not enter the last world; the agent starts it again for this one."""


class World(Message):
    """One generation: the nodes that train together. The same for all members, except for their own `Member`."""

    generation: int = Field(ge=1)
    members: dict[int, Member]
    """The members, by node rank (slot)."""
    store_address: str
    store_port: int
    store_rank: int
    """The node (slot) that hosts the store."""
    stage: int = 0
    """The torchrun of the command that the world is for, counted from 0."""
    first_step: Duration | None = None
    """The time that its ranks have to make their first step; None for no limit."""

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def processes(self) -> int:
        """torch's WORLD_SIZE."""
        return sum(member.processes for member in self.members.values())


class GroupDesire(Message):
    """To a NodeGroup: its whole desired state. A later one replaces an earlier one."""

    version: int
    """Only ever grows; the group ignores an older desired state that arrives late."""
    nodes: dict[int, DesiredNode]
    world: World | None = None
    """The current world. The group acts on its own members, and only counts the others."""
    world_size: int = 0
    world_nodes: int = 0
    undisturbed: bool = False
    """No fault of the world is known, so a node that joins must not break it."""
    inquiry: int = 0
    """Grows whenever the job asks whether members that have not reported steps have entered the world. The group then
    sends them the world again."""
    nodes_min: int | None = None
    """The minimum number of nodes that the job trains with."""
    complete_generation: int = 0
    """Every rank of the world has finished this generation: torchrun may leave its exit barrier."""
    stages_complete: int = 0
    """The number of the command's torchruns that the job has finished."""
    commit: Commit | None = None
    """The newest checkpoint that is complete, until it is committed."""
    checkpoint_orders: int = 0
    """The newest request for a checkpoint that none has answered; 0 for none."""
    distrusted_checkpoints: tuple[str, ...] = ()
    """Folders in the job's storage that are not loaded any more."""
    wind_down: bool = False
    """Delete everything and close."""
    reason: str = ""
    """Shown in the Temporal UI on what this desire causes."""


class Adopt(Message):
    """To a NodeGroup that already runs: a job that was reset, or that took the place of an earlier one, adopts it."""

    ownership_epoch: str = ""
    """The group repeats it in every `transitions` signal from now on."""
