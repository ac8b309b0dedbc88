"""The state of one job: there is no other, and continue-as-new carries it whole.

Values are immutable; a decision makes new ones. Nodes are keyed by their rank (slot), which outlives incarnations.
"""

from __future__ import annotations

from datetime import datetime
from typing import Self

from pydantic import Field

from perdure.contract import (
    Actions,
    FailureClass,
    Incarnation,
    IncidentView,
    JobPhase,
    LossCause,
    Message,
    NodeCredentials,
    NodePhase,
    Progress,
    Ticket,
    UnprocessedSamples,
    World,
)
from perdure.contract.base import LogTail, ShortText
from perdure.spec.durations import Duration
from perdure.workflows.policy.behavior import CURRENT, Behavior
from perdure.workflows.policy.facts.events import RelaunchRequested, SuspendRequested
from perdure.workflows.policy.state.checkpoint import CheckpointState


class NodeFailure(Message):
    """One node's report about the generation that broke."""

    rank: int
    failure: FailureClass
    time: datetime
    """When it happened."""
    exit_code: int | None = None
    text: ShortText
    """A description for people."""
    log_tail: LogTail = ""
    certain: bool = True
    """False where only an exit code is known: the node may be a victim that did not report why it failed."""
    ranks: tuple[int, ...] = ()
    """The global ranks that failed, as far as they are known."""


class NodeState(Incarnation):
    """The newest incarnation of one node."""

    token: str = Field(repr=False)
    phase: NodePhase = NodePhase.REQUESTED
    since: datetime
    """When the phase began."""
    reason: str = ""
    loss_cause: LossCause = LossCause.WANTED
    """Why a LOST node was lost."""
    avoids: tuple[str, ...] = ()
    """Machines that its request avoids."""
    queued: bool = False
    """Pending without a machine: its queue has not admitted it, or no machine has room."""
    reachable: bool = True
    silent_since: datetime | None = None
    """When it last became unreachable."""
    host: str = ""
    address: str = ""
    processes: int = 1
    store_ports: tuple[int, ...] = ()
    """Ports that it listens on and that no generation of this job has used."""
    used_ports: tuple[int, ...] = ()
    """Ports that generations have used, which late reports may still list."""
    commanded: int = 0
    """The newest generation that its agent has accepted."""
    entered: int = 0
    """The newest generation that it is known to have entered."""
    stepping: int = 0
    """The newest generation that it runs in: its ranks have stepped there, or stayed alive for a while."""
    stepped: int = 0
    """The newest generation that it was seen to step in."""
    without_checkpoints: int = 0
    """The newest generation in which its ranks stepped and had not begun to save into the job's storage."""
    finished: int = 0
    """The newest generation that all its ranks finished."""
    stage: int = 0
    """The number of torchruns of its command that had ended with 0 when it last requested a world."""
    counts_stages: bool = False
    """Its agent reports the stage of its command, and the command's end."""
    ended: bool = False
    """Its command has ended with 0."""
    failed: NodeFailure | None = None
    """The failure of its command after its ranks had finished and others had not: handled when the world is
    complete."""
    catching_up: bool = False
    """Its command started over after a stage was complete, and has not skipped all complete stages yet."""
    preparing: bool = False
    """Its command runs, and has not started its torchrun yet."""
    waits: str = ""
    """What its command waits for before it starts."""
    command_restarts: int = 0
    """The number of restarts of its command between two worlds that were requested."""
    released: bool = False
    """It is being ended from outside, and need not wait for a checkpoint any longer."""
    failed_between: int = 0
    """The number of failures of its command since the newest stage was complete."""
    stalled_in: int = 0
    """The generation in which its ranks are stalled; 0 for none."""
    stalled_since: datetime | None = None
    """When the stalled ranks made their last step, or entered their world if they have made none in it."""
    stalled_at_start: bool = False
    """The stalled ranks have made no step in their world."""
    cut_off: bool = False
    """It waits for a world, and cannot connect to the current one; `reason` names the address."""
    missed_worlds: int = 0
    """Worlds in a row that its command did not enter in time."""
    failed_starts: int = 0
    """Incarnations of this rank in a row that were lost before they were ready."""
    not_before: datetime | None = None
    """No replacement is requested before this time."""
    uncreated_since: datetime | None = None
    """Since when its backend has refused to create it, other than for lack of capacity; older incarnations count."""
    ranks_ended: bool = False
    """Its agent has reported that its processes have ended, because something outside ends the node."""
    left_world: bool = False
    """It was a member of a world, and the next world does not include it, whether or not its agent had accepted that
    world."""
    may_still_run: bool = False
    """It was given up while in a world, and nothing proves that its processes have ended."""
    predecessor: int = 0
    """The older incarnation whose processes may still run; 0 for none. Until they have ended it enters no world."""
    predecessor_until: datetime | None = None
    """When the predecessor is presumed gone without proof."""
    command_nodes: str | None = None
    """The command's own `--nnodes`, if it differs from the job's."""
    sequences: tuple[int, ...] = ()
    """Sequence numbers of its last messages to the job: exact repeats are dropped, late ones are not."""

    @property
    def alive(self) -> bool:
        """No evidence shows that it is gone."""
        return self.phase not in (NodePhase.LOST, NodePhase.REMOVED)

    def replace(self, **fields: object) -> Self:
        return self.model_copy(update=fields)


class Holder(Message):
    """The process of `perdure join` that took a place, on a backend that only keeps places open."""

    node_id: str
    session: str
    stay: int
    host: str
    started_at: datetime
    since: datetime
    """When it took the place."""
    incarnation: int
    """The incarnation that it was given, or will be given once there is one."""
    displaced: tuple[str, ...] = ()
    """Sessions that joined under the same node ID before and are over."""
    ticket: str = ""
    """The ID of the ticket with which it joined through the gateway; empty if it reached Temporal itself."""


class MachineLoss(Message):
    """The loss of a node on a machine, other than a removal on purpose."""

    host: str
    time: datetime
    cause: LossCause


class Interruption(Message):
    """The reason why the current world is over: gathered until a decision is made."""

    since: datetime
    """When the job first learned of it."""
    failures: tuple[NodeFailure, ...] = ()
    requested: str | None = None
    """Why a new world is requested although nothing has failed, in words."""
    by_user: bool = False
    """A user requested it; otherwise the capacity changed."""
    actions: Actions = ()
    """The decision on it; without any, none is made."""
    counted: bool = False
    """Its restart is charged to the budgets: news may change the decision, but it stays one restart."""

    @property
    def decided(self) -> bool:
        """The decision is made; only nodes for the next world are missing."""
        return bool(self.actions)

    def ranks_with(self, *failures: FailureClass) -> frozenset[int]:
        """The nodes (slots) that reported one of these classes."""
        return frozenset(failure.rank for failure in self.failures if failure.failure in failures)


class LeavingNode(Incarnation):
    """An incarnation that was given up on request, and whose ranks may still save a checkpoint."""

    until: datetime
    """When it is presumed gone without proof."""


class Outcome(Message):
    """The end of the job; its nodes are wound down before it closes."""

    phase: JobPhase
    exit_code: int
    reason: str
    decided_at: datetime
    held_until: datetime | None = None
    """The time until which the nodes are kept for inspection: see `perdure.workflows.policy.repair.hold_on_failure`."""


class TransitionsTaken(Message):
    """The position in one group's messages that the job has processed, by which it recognizes repeats."""

    sequence: int = 0
    """The sequence number of the last message."""
    transitions: int = 0
    """The number of transitions that the group has delivered since it began."""


class PostponedChange(Message):
    """A change that waits until a checkpoint is durable: see `perdure.workflows.policy.capacity.planned_changes`."""

    title: str
    """What follows, in words."""
    order: int
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

    @property
    def requested(self) -> bool:
        """Whether a request or the end of a node waits; otherwise only the next world does."""
        return self.suspend is not None or bool(self.relaunches) or bool(self.endings)

    def with_request(self, request: SuspendRequested | RelaunchRequested) -> Self:
        if isinstance(request, SuspendRequested):
            return self.model_copy(update={"suspend": request})
        others = (one for one in self.relaunches if one.rank != request.rank)
        return self.model_copy(update={"relaunches": (*others, request)})


class JobState(Message):
    """One job. `perdure.workflows.policy.decide.decide` is the only writer."""

    behavior: Behavior = CURRENT
    """The behavior of the current run, set when a run begins."""
    name: str
    namespace: str
    uid: str
    role: str
    started_at: datetime
    phase: JobPhase = JobPhase.STARTING
    reason: str = ""
    nodes_min: int
    nodes_max: int
    unit: int = 1
    nodes: dict[int, NodeState] = Field(default={})
    holders: dict[int, Holder] = Field(default={})
    """The last holder of each place, by node (slot), if nodes join by themselves."""
    tickets: tuple[Ticket, ...] = ()
    """Tickets for joining through the gateway that were not revoked; expired ones let their machines come back."""
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
    complete_generation: int = 0
    """The newest generation that all ranks of the job have finished."""
    stages_complete: int = 0
    """The number of torchruns of the command that the job has finished: the current stage, from 0."""
    prepares: bool = False
    """A command has worked for long before its torchrun, so the next one will, too."""
    suspended: bool = False
    request_reasons: dict[int, str] = Field(default={})
    """The user's request that adds or removes a node (slot), until a world has followed."""
    waiting_since: datetime | None = None
    """The time since which no world can be formed, for another reason than the queue that keeps the first one
    waiting."""
    queued_since: datetime | None = None
    """The time since which the first world waits in the queue, including waits for other reasons in between."""
    ready_since: datetime | None = None
    """The time since which a (larger) world could be formed: the last call counts from here."""
    incidents: tuple[IncidentView, ...] = ()
    incident_count: int = 0
    leaving: tuple[LeavingNode, ...] = ()
    """Nodes that must end before the next world is formed: see `perdure.workflows.policy.world.succession`."""
    losses: tuple[MachineLoss, ...] = ()
    """Losses that speak against machines, in the order in which nodes were replaced: see
    `perdure.workflows.policy.capacity.node_avoidance`."""
    restarts: tuple[datetime, ...] = ()
    """Times of restarts that failures caused, within the budget's window."""
    restart_count: int = 0
    """Restarts that failures caused since the job began; nodes lost together or soon after one another count once."""
    first_step: Duration | None = None
    """The longest time from entering a world to its first step, in this stage: see
    `perdure.workflows.policy.diagnosis.first_steps`."""
    missed_first_steps: int = 0
    """Worlds in a row that were ended because they made no first step in time."""
    last_failure: FailureClass | None = None
    """The class of the last failure that was charged to the budgets, in this stage."""
    failures_without_progress: int = 0
    best_step: int = -1
    """The highest step reported before a failure."""
    last_generation_steps: int = -1
    """Steps counted in the attempt before the last failure."""
    progress: Progress | None = None
    control_lag_until: datetime | None = None
    """Set when reports came late: the control plane was unavailable, and agents may take seconds to poll again."""
    desire_version: int = 0
    wound_down_groups: tuple[int, ...] = ()
    ownership_epochs: dict[int, str] = Field(default={})
    """The newest start or adoption of each group."""
    taken: dict[int, TransitionsTaken] = Field(default={})
    """The messages of each group that were processed in this ownership epoch."""
    outcome: Outcome | None = None
    checkpoints: CheckpointState = CheckpointState()
    unprocessed: dict[str, UnprocessedSamples] = Field(default={})
    """What was set aside, by dataset."""
    postponed: PostponedChange | None = None
    first_ranks_before: dict[int, int] = Field(default={})
    """The global ranks of the members' first ranks in the world before this one, by node (slot)."""
    wrong_claims: int = 0
    """What nodes have reported of ranks or worlds that are not theirs: see
    `perdure.workflows.policy.diagnosis.claims`."""
    last_wrong_claim: str = ""
    dropped_events: int = 0
    """Events that could not be decided on: a defect of this release, or a malformed message."""
    last_dropped: str = ""
    """The type and the error of the last dropped event."""

    def replace(self, **fields: object) -> Self:
        return self.model_copy(update=fields)

    def stop(self, outcome: Outcome) -> Self:
        """The state after the decision how the job ends."""
        return self.replace(outcome=outcome, interruption=None)

    @property
    def between_stages(self) -> bool:
        """All ranks have finished, and the commands continue by themselves: no world is needed, and none can break."""
        requested = self.interruption is not None and self.interruption.requested is not None
        return self.world is not None and self.complete_generation >= self.world.generation and not requested

    def with_node(self, node: NodeState) -> Self:
        return self.replace(nodes={**self.nodes, node.rank: node})

    @property
    def all_restarts(self) -> int:
        """The number of restarts since the job began."""
        return self.restart_count

    @property
    def held(self) -> bool:
        """It has failed, and its nodes are kept for inspection."""
        return self.outcome is not None and self.outcome.held_until is not None

    @property
    def members(self) -> tuple[NodeState, ...]:
        """The incarnations of the current world, lost ones included until they are replaced; by group rank."""
        if self.world is None:
            return ()
        members = self.world.members
        by_group_rank = sorted(members, key=lambda rank: members[rank].group_rank)
        return tuple(node for rank in by_group_rank if self.is_member(node := self.nodes[rank]))

    def is_current(self, sender: NodeCredentials) -> bool:
        """Whether the sender is a desired incarnation of this run, and proves it by its token."""
        node = self.nodes.get(sender.rank)
        known = node is not None and node.alive and (sender.incarnation, sender.token) == (node.incarnation, node.token)
        return known and sender.uid == self.uid

    def is_member(self, node: NodeState) -> bool:
        """Whether this incarnation is part of the current world."""
        member = self.world.members.get(node.rank) if self.world is not None else None
        return member is not None and member.incarnation == node.incarnation

    @property
    def stepping(self) -> bool:
        """Every member of the world runs in it, or has finished."""
        world = self.world
        return world is not None and all(
            self.is_member(node := self.nodes[rank]) and max(node.stepping, node.finished) >= world.generation
            for rank in world.members
        )

    @property
    def stepped(self) -> bool:
        """Every member of the world was seen to step in it."""
        world = self.world
        return world is not None and all(
            self.is_member(node := self.nodes[rank]) and node.stepped >= world.generation for rank in world.members
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

    @property
    def open_incident(self) -> IncidentView | None:
        """The last incident, while its world does not run yet."""
        incident = self.last_incident
        return incident if incident is not None and incident.over_at is None else None

    @property
    def last_incident(self) -> IncidentView | None:
        """The last interruption, ignoring observations."""
        return next((one for one in reversed(self.incidents) if one.observation is None), None)
