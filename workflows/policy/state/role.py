"""The state of one role of a job: its nodes and worlds, and what is wrong with them.

A role is decided by itself (`perdure.workflows.policy.decide.advance_role`), so nodes are keyed by their rank (slot) in
it, which outlives incarnations.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Self

from pydantic import Field

from perdure.contract import (
    Actions,
    AutoResources,
    FailureClass,
    Hang,
    Incarnation,
    JobPhase,
    Message,
    Peaks,
    PrintedLines,
    Progress,
    RankNumber,
    Slowness,
    World,
)
from perdure.spec.durations import Duration
from perdure.workflows.policy.facts.events import RelaunchRequested, SuspendRequested
from perdure.workflows.policy.state.checkpoint import CheckpointState
from perdure.workflows.policy.state.host_memory import HostMemory
from perdure.workflows.policy.state.memory import RepairMemory
from perdure.workflows.policy.state.node import LeavingNode, NodeFailure, NodeState, SlotOwner
from perdure.workflows.policy.state.scaling import ScalingState


class Interruption(Message):
    """The reason why the current world is over: gathered until a decision is made."""

    since: datetime
    """When the job first learned of it."""
    failures: tuple[NodeFailure, ...] = ()
    requested: str | None = None
    """Why a new world is requested although nothing has failed, in words."""
    by_user: bool = False
    """A user requested it; otherwise the capacity changed."""
    begun_by: str = ""
    """The role with which this one starts again; empty where the interruption is the role's own."""
    reached_others: bool = False
    """The roles that start again with this one were interrupted, too."""
    restarts_all: bool = False
    """Processes that depend on no world are restarted, too."""
    hang: Hang | None = None
    """What was found where it began with a rank that hangs."""
    slowness: Slowness | None = None
    """The slow rank for which it began."""
    partner: int | None = None
    """The node (slot) that exchanges its place with that of this rank."""
    actions: Actions = ()
    """The decision on it; without any, none is made."""
    counted: bool = False
    """Its restart is charged to the budgets: news may change the decision, but it stays one restart."""
    waits: str = ""
    """What follows once the decision need not wait any longer, for users; empty where it does not wait for long."""
    unpaused: bool = False
    """A user has ended the pause before its ranks are restarted."""
    excused: timedelta = timedelta()
    """How much longer reports are awaited, because no worker could take them in while they were due."""

    @property
    def decided(self) -> bool:
        """The decision is made; only nodes for the next world are missing."""
        return bool(self.actions)

    def ranks_with(self, *failures: FailureClass) -> frozenset[int]:
        """The nodes (slots) that reported one of these classes."""
        return frozenset(failure.rank for failure in self.failures if failure.failure in failures)


class NodeLines(Message):
    """What a node has printed in a generation that is over."""

    rank: int
    printed: PrintedLines


class SeenNumber(Message):
    """A number of a rank that is not finite: see `perdure.workflows.policy.diagnosis.bad_numbers`."""

    node: int
    """The node (slot) that reported it."""
    generation: int
    number: RankNumber
    time: datetime
    arrived_at: datetime
    recorded: bool = False
    """It interrupts nothing, and users can read it."""

    def is_about(self, other: SeenNumber) -> bool:
        """Whether both are of the same node and kind, of which an agent that was started again reports one again."""
        return (self.node, self.number.kind) == (other.node, other.number.kind)


class WrongResult(Message):
    """A wrong result of a rank that was found while repairs were paused: see
    `perdure.workflows.policy.diagnosis.corruption`."""

    generation: int
    failure: NodeFailure


class TransitionsTaken(Message):
    """The position in one group's messages that the job has processed, by which it recognizes repeats."""

    sequence: int = 0
    """The sequence number of the last message."""
    transitions: int = 0
    """The number of transitions that the group has delivered since it began."""
    run: str = ""
    """The group's run that sent the last message; empty where it did not say."""


class PostponedChange(Message):
    """A change that waits until a checkpoint is durable: see `perdure.workflows.policy.capacity.planned_changes`."""

    title: str
    """What follows, in words."""
    checkpoint_request: int
    """The number of the requested checkpoint."""
    since: datetime
    until: datetime
    """When the change is carried out without it."""
    generation: int
    """The generation that makes the checkpoint."""
    suspend: SuspendRequested | None = None
    relaunches: tuple[RelaunchRequested, ...] = ()
    endings: tuple[Incarnation, ...] = ()
    """Nodes that are being ended from outside."""
    slow_rank: bool = False
    """Something is to be done about a slow rank."""
    stores: bool = True
    """A checkpoint in storage was requested for it."""
    holds: bool = False
    """The ranks are to wait at a step, once the checkpoint is durable: see
    `perdure.workflows.policy.checkpoints.holds`."""
    resizes: bool = False
    """A world of another size follows."""
    leaves: bool = False
    """A node of the world leaves."""
    hold: int = 0
    """The number of the request that they do; 0 before it."""
    refused: str = ""
    """Why the change is not made: the state would be lost. It is looked at again at `until`."""
    begun_again: int = 0
    """Times that the wait has begun again, as the job could not decide at its end."""

    @property
    def requested(self) -> bool:
        """Whether a request or the end of a node waits; otherwise only the next world does."""
        return self.suspend is not None or bool(self.relaunches) or bool(self.endings)

    def with_request(self, request: SuspendRequested | RelaunchRequested) -> Self:
        if isinstance(request, SuspendRequested):
            return self.replace(suspend=request)
        others = (one for one in self.relaunches if one.rank != request.rank)
        return self.replace(relaunches=(*others, request))


class NoRoom(Message):
    """What no machine has room for."""

    requests: dict[str, str]
    """Requests of `cpu` and `memory`."""
    until: datetime
    """The time until which that is taken to be so."""


class RoleState(Message):
    """One role: nodes with the same command, and the world that they form."""

    role: str
    """Its name."""
    phase: JobPhase = JobPhase.STARTING
    reason: str = ""
    completed: str = ""
    """Why the role has succeeded; empty until all its commands have ended."""
    failed: str = ""
    """Why the role was given up while the job continues; empty where it was not."""
    suspended_alone: bool = False
    """A user has suspended this role, whatever holds for the whole job."""
    nodes_min: int
    nodes_max: int
    unit: int = 1
    nodes: dict[int, NodeState] = Field(default={})
    slot_owners: dict[int, SlotOwner] = Field(default={})
    """The last owner of each slot, if nodes join by themselves."""
    generation: int = 0
    """The newest generation given to any node."""
    world: World | None = None
    world_decided_at: datetime | None = None
    inquiry: int = 0
    """Times that the job has asked whether members entered their world: see
    `perdure.workflows.policy.world.entering`."""
    inquired_at: datetime | None = None
    interruption: Interruption | None = None
    """Set from the first evidence that the current world is over until the next one is sent out."""
    bad_numbers: tuple[SeenNumber, ...] = ()
    """Numbers of the current world that are not finite; those of an older one count no more."""
    wrong_results: tuple[WrongResult, ...] = ()
    """Those of the current world, until repairs are not paused any longer; those of an older one count no more."""
    new_step_times: bool = False
    """A node has reported how its steps split, and the ranks are not compared yet."""
    complete_generation: int = 0
    """The newest generation that all ranks of the job have finished."""
    stages_complete: int = 0
    """The number of torchruns of the command that the job has finished: the current stage, from 0."""
    prepares: bool = False
    """A command has worked for long before its torchrun, so the next one will, too."""
    request_reasons: dict[int, str] = Field(default={})
    """The user's request that adds or removes a node (slot), until a world has followed."""
    waiting_since: datetime | None = None
    """The time since which no world can be formed, for another reason than the queue that keeps the first one
    waiting."""
    queued_since: datetime | None = None
    """The time since which the first world waits in the queue, including waits for other reasons in between."""
    ready_since: datetime | None = None
    """The time since which a (larger) world could be formed: the last call counts from here."""
    is_due: bool = False
    """That world waits for no more nodes, but perhaps for something else."""
    leaving: tuple[LeavingNode, ...] = ()
    """Nodes that must end before the next world is formed: see `perdure.workflows.policy.world.succession`."""
    first_step: Duration | None = None
    """The longest time from entering a world to its first step, in this stage: see
    `perdure.workflows.policy.diagnosis.first_steps`."""
    stepped_within: Duration | None = None
    """The longest time that a world of this stage lasted which failed after steps, while no `first_step` is known: its
    first step took no longer."""
    lines: tuple[NodeLines, ...] = ()
    """What nodes have printed that failed in the newest generation that did, the last report first."""
    memory: RepairMemory = RepairMemory()
    scaling: ScalingState = ScalingState()
    host_memory: HostMemory = HostMemory()
    smaller: dict[str, str] = Field(default={})
    """What new nodes request of `cpu` and `memory` instead of what the specification says: as a user has requested, or
    found by `perdure.workflows.policy.capacity.smaller_requests`."""
    of_nodes: dict[int, dict[str, str]] = Field(default={})
    """What nodes (slots) request of `cpu` and `memory` that a user has given other requests than their role."""
    short_since: datetime | None = None
    """Since when nodes wait for a machine that could request less."""
    no_room: NoRoom | None = None
    """What no machine has room for, although it is less than the role requests."""
    auto: AutoResources | None = None
    """What `resources: auto` has become."""
    restarts: tuple[datetime, ...] = ()
    """Times of restarts that failures caused, within the budget's window."""
    progress: Progress | None = None
    peaks: Peaks | None = None
    """The most that one of its nodes has used of its machine, as far as their agents have reported it to the job."""
    desire_version: int = 0
    wound_down_groups: tuple[int, ...] = ()
    ownership_epochs: dict[int, str] = Field(default={})
    """The newest start or adoption of each group."""
    taken: dict[int, TransitionsTaken] = Field(default={})
    """The messages of each group that were processed in this ownership epoch."""
    checkpoints: CheckpointState = CheckpointState()
    postponed: PostponedChange | None = None
    first_ranks_before: dict[int, int] = Field(default={})
    """The global ranks of the members' first ranks in the world before this one, by node (slot)."""

    @property
    def is_over(self) -> bool:
        """The role needs no nodes any more: it has completed, or was given up."""
        return bool(self.completed or self.failed)

    @property
    def is_idle(self) -> bool:
        """The role has neither a world nor nodes."""
        return self.world is None and not any(node.alive for node in self.nodes.values())

    @property
    def between_stages(self) -> bool:
        """All ranks have finished, and the commands continue by themselves: no world is needed, and none can break."""
        requested = self.interruption is not None and self.interruption.requested is not None
        return self.world is not None and self.complete_generation >= self.world.generation and not requested

    def with_node(self, node: NodeState) -> Self:
        return self.replace(nodes={**self.nodes, node.rank: node})

    @property
    def members(self) -> tuple[NodeState, ...]:
        """The incarnations of the current world, lost ones included until they are replaced; by group rank."""
        if self.world is None:
            return ()
        members = self.world.members
        by_group_rank = sorted(members, key=lambda rank: members[rank].group_rank)
        nodes = self.nodes
        return tuple(node for rank in by_group_rank if (node := nodes[rank]).incarnation == members[rank].incarnation)

    @property
    def members_not_running(self) -> list[NodeState]:
        """Members that are not known to have run in the current world, or to have finished it, in any order."""
        if self.world is None:
            return []
        generation = self.world.generation
        # Hardly any of a thousand nodes is left after the first two comparisons.
        late = (node for node in self.nodes.values() if node.stepping < generation and node.finished < generation)
        return [node for node in late if self.is_member(node)]

    def is_member(self, node: NodeState) -> bool:
        """Whether this incarnation is part of the current world."""
        member = self.world.members.get(node.rank) if self.world is not None else None
        return member is not None and member.incarnation == node.incarnation

    def is_late(self, node: NodeState) -> bool:
        """Whether the node is a member of the current world, and not known to run in it or to have finished it."""
        world = self.world
        return world is not None and self.is_member(node) and max(node.stepping, node.finished) < world.generation

    @property
    def stepping(self) -> bool:
        """Every member of the world runs in it, or has finished."""
        world = self.world
        if world is None:
            return False
        nodes, generation = self.nodes, world.generation
        return all(
            (node := nodes[rank]).incarnation == member.incarnation
            and (node.stepping >= generation or node.finished >= generation)
            for rank, member in world.members.items()
        )

    @property
    def stepped(self) -> bool:
        """Every member of the world was seen to step in it."""
        world = self.world
        if world is None:
            return False
        nodes, generation = self.nodes, world.generation
        return all(
            (node := nodes[rank]).incarnation == member.incarnation and node.stepped >= generation
            for rank, member in world.members.items()
        )

    @property
    def has_stepped(self) -> bool:
        """Whether a step of this stage was seen."""
        return self.first_step is not None or self.progress is not None

    @property
    def stalled(self) -> tuple[NodeState, ...]:
        """Members that have stepped in the current world and are stalled; by group rank."""
        world = self.world
        if world is None:
            return ()
        # This is read for each of a thousand nodes that fail at once, so the cheap checks come first.
        still = [node for node in self.nodes.values() if node.stalled_in == world.generation and node.alive]
        members = (node for node in still if self.is_member(node))
        return tuple(sorted(members, key=lambda node: world.members[node.rank].group_rank))

    def has_finished(self, node: NodeState) -> bool:
        """Whether all the node's ranks have finished the current world."""
        return self.world is not None and node.finished >= self.world.generation

    @property
    def finished(self) -> bool:
        """All ranks of one generation have finished."""
        world = self.world
        return world is not None and all(
            self.is_member(node := self.nodes[rank]) and self.has_finished(node) for rank in world.members
        )
