"""What one job knows: the only state there is, carried whole through continue-as-new.

Values are immutable; a decision makes new ones. Nodes are keyed by their rank (slot), which outlives incarnations.
"""

from __future__ import annotations

from datetime import datetime
from typing import Self

from pydantic import Field

from workflows.messages import (
    FailureClass,
    IncidentView,
    JobPhase,
    LossCause,
    Message,
    NodeIdentity,
    NodePhase,
    Progress,
    World,
)
from workflows.messages.base import LogTail, ShortText
from workflows.policy.behavior import CURRENT, Behavior


class NodeFailure(Message):
    """What one node reported about the generation that broke."""

    rank: int
    failure: FailureClass
    time: datetime
    """When it happened."""
    exit_code: int | None = None
    text: ShortText
    """For people."""
    log_tail: LogTail = ""
    certain: bool = True
    """False where only an exit code is known: it may be a victim that did not report why it failed."""


class NodeState(Message):
    """The newest incarnation of one node."""

    rank: int
    incarnation: int
    token: str
    phase: NodePhase = NodePhase.REQUESTED
    since: datetime
    """When the phase began."""
    reason: str = ""
    loss_cause: LossCause = LossCause.WANTED
    """Of LOST: whose doing it was."""
    avoids: tuple[str, ...] = ()
    """Machines that its request avoids."""
    queued: bool = False
    """Pending, and no machine is given to it: its queue has not admitted it, or none has room."""
    reachable: bool = True
    silent_since: datetime | None = None
    """When it was found unreachable last."""
    host: str = ""
    address: str = ""
    processes: int = 1
    store_ports: tuple[int, ...] = ()
    """Ports that it listens on and that no generation of ours has used."""
    used_ports: tuple[int, ...] = ()
    """Given away, and still in reports that were on their way."""
    commanded: int = 0
    """The newest generation that its agent has accepted."""
    entered: int = 0
    """The newest generation that it is known to have entered."""
    stepping: int = 0
    """The newest generation that it runs in: its ranks have stepped there, or stayed alive for a while."""
    stepped: int = 0
    """The newest generation that it was seen to step in."""
    finished: int = 0
    """The newest generation that all its ranks finished."""
    stage: int = 0
    """How many torchruns of its command had ended with 0 when it last asked for a world."""
    counts_stages: bool = False
    """Its agent says which stage its command is in, and when the command ends."""
    ended: bool = False
    """Its command has ended with 0."""
    failed: NodeFailure | None = None
    """How its command failed when its ranks had finished and others had not: acted on when the world is complete."""
    catching_up: bool = False
    """Its command began anew after a stage was complete, and has not passed over what is."""
    preparing: bool = False
    """Its command works, and has not come to its torchrun yet."""
    command_restarts: int = 0
    """How often its command was to be started again between two worlds."""
    failed_between: int = 0
    """How often its command failed since the newest stage was complete."""
    stalled_in: int = 0
    """The generation in which its ranks are stalled; 0 for none."""
    stalled_since: datetime | None = None
    """When they made their last step."""
    cut_off: bool = False
    """It waits for a world, and does not get to the current one; `reason` says where to."""
    missed_worlds: int = 0
    """Worlds in a row that its command did not enter in time."""
    failed_starts: int = 0
    """Incarnations of this rank in a row that were lost before they were ready."""
    not_before: datetime | None = None
    """A replacement is not asked for before this time."""
    ranks_ended: bool = False
    """Its agent has reported that its processes have ended, because something outside ends the node."""
    left_world: bool = False
    """It was a member of a world that was followed by one without it, whether or not its agent had accepted that."""
    may_still_run: bool = False
    """Of one that was given up: it was in a world, and nothing proves that its processes have ended."""
    predecessor: int = 0
    """The older incarnation whose processes may still run; 0 for none. Until they have ended it enters no world."""
    predecessor_until: datetime | None = None
    """When the predecessor is presumed gone without proof."""
    command_nodes: str | None = None
    """`--nnodes` as the command itself was given it, where that differs."""
    heard: tuple[int, ...] = ()
    """Sequence numbers of its last messages to the job: exact repeats are dropped, late ones are not."""

    @property
    def alive(self) -> bool:
        """Nothing says that it is gone."""
        return self.phase not in (NodePhase.LOST, NodePhase.REMOVED)

    def changed(self, **fields: object) -> Self:
        return self.model_copy(update=fields)


class Holder(Message):
    """Who took a place that the backend only keeps open: a process of `perdure join`."""

    node_id: str
    session: str
    stay: int
    host: str
    started_at: datetime
    since: datetime
    """When it took the place."""
    incarnation: int
    """That it was given, or will be once there is one."""
    displaced: tuple[str, ...] = ()
    """Sessions that came under the same node ID before and are over."""


class MachineLoss(Message):
    """A node that was lost on a machine, and not because it was to go."""

    host: str
    time: datetime
    cause: LossCause


class Interruption(Message):
    """Why the current world is over: gathered until a decision is made."""

    since: datetime
    """When the job first learned of it."""
    failures: tuple[NodeFailure, ...] = ()
    requested: str | None = None
    """Why a new world is requested although nothing has failed, in words."""
    by_user: bool = False
    """A user requested it; otherwise capacity came or went."""
    decided: bool = False
    """Only nodes for the next world are still missing."""
    counted: bool = False
    """Its restart is in the budgets: news may change the decision, but it stays one restart."""

    def ranks_with(self, *failures: FailureClass) -> frozenset[int]:
        """The nodes (slots) that reported one of these."""
        return frozenset(failure.rank for failure in self.failures if failure.failure in failures)


class LeavingNode(Message):
    """An incarnation that was given up on request, and whose ranks may still save a checkpoint."""

    rank: int
    incarnation: int
    until: datetime
    """When it is presumed gone without proof."""


class Outcome(Message):
    """How the job ends; the nodes are wound down before it closes."""

    phase: JobPhase
    exit_code: int
    reason: str
    decided_at: datetime
    held_until: datetime | None = None
    """Until then the nodes are kept for looking at: see `workflows.policy.hold_on_failure`."""


class TransitionsTaken(Message):
    """How far the job has taken the messages of one group: a repeat is recognised by it."""

    sequence: int = 0
    """Of the last message."""
    transitions: int = Field(default=0, validation_alias="edges", serialization_alias="edges")
    """All that the group has delivered so far, counted since the group began."""


class JobState(Message):
    """One job. `workflows.policy.job.decide` is the only writer."""

    behavior: Behavior = CURRENT
    """Of the current run: it is set anew whenever one begins."""
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
    """By node (slot): who took it last, where nodes come by themselves."""
    generation: int = 0
    """The newest one given to any node."""
    world: World | None = None
    world_decided_at: datetime | None = None
    inquiry: int = 0
    """How often the job has asked where members of a world are: see `workflows.policy.entering`."""
    inquired_at: datetime | None = None
    interruption: Interruption | None = None
    """Set from the first sign that the current world is over until the next one is handed out."""
    complete_generation: int = 0
    """The newest generation that all ranks of the job have finished."""
    stages_complete: int = 0
    """How many torchruns of the command the job has finished: the current stage, from 0."""
    prepares: bool = False
    """A command was seen to work for long before its torchrun: the next one will, too."""
    suspended: bool = False
    asked_for: dict[int, str] = Field(default={})
    """By node (slot): the user's request that adds or removes it, until a world has followed."""
    waiting_since: datetime | None = None
    """Since when no world can be formed, although it is not the queue that keeps the first one waiting."""
    queued_since: datetime | None = None
    """Since when the first world waits in the queue, with what was waited for other reasons in between."""
    ready_since: datetime | None = None
    """Since when a (larger) world could be formed: the last call counts from here."""
    incidents: tuple[IncidentView, ...] = ()
    incident_count: int = 0
    leaving: tuple[LeavingNode, ...] = ()
    """No world is formed until these have ended: see `workflows.policy.succession`."""
    losses: tuple[MachineLoss, ...] = ()
    """What speaks against machines, in the order that nodes were replaced: see `workflows.policy.node_avoidance`."""
    restarts: tuple[datetime, ...] = ()
    """Times of restarts that failures caused, within the budget's window."""
    restart_count: int = 0
    """Restarts that failures caused since the job began; nodes lost together, or at once after, are one."""
    failures_without_progress: int = 0
    best_step: int = -1
    """The highest step reported before a failure."""
    last_generation_steps: int = -1
    """Steps counted in the attempt before the last failure."""
    progress: Progress | None = None
    control_lag_until: datetime | None = None
    """Reports came late: the control plane had been away, and agents may take seconds to poll again."""
    desire_version: int = 0
    wound_down_groups: tuple[int, ...] = ()
    ownership_epochs: dict[int, str] = Field(default={}, validation_alias="tenures", serialization_alias="tenures")
    """By group: the newest start or adoption of it."""
    taken: dict[int, TransitionsTaken] = Field(default={})
    """By group: what was taken of its messages in this tenure."""
    outcome: Outcome | None = None
    dropped_events: int = 0
    """Events that could not be decided on: a defect of this release, or a malformed message."""
    last_dropped: str = ""
    """What the last of them was, and the error."""

    def changed(self, **fields: object) -> Self:
        return self.model_copy(update=fields)

    def stopped(self, outcome: Outcome) -> Self:
        """It is decided how the job ends."""
        return self.changed(outcome=outcome, interruption=None)

    @property
    def between_stages(self) -> bool:
        """All ranks have finished, and the commands work on by themselves: no world is needed, and none can break."""
        requested = self.interruption is not None and self.interruption.requested is not None
        return self.world is not None and self.complete_generation >= self.world.generation and not requested

    def with_node(self, node: NodeState) -> Self:
        return self.changed(nodes={**self.nodes, node.rank: node})

    @property
    def all_restarts(self) -> int:
        """What `restart_count` says; an earlier release counted those within the window only."""
        return max(self.restart_count, len(self.restarts))

    @property
    def held(self) -> bool:
        """It has failed, and its nodes are kept for looking at."""
        return self.outcome is not None and self.outcome.held_until is not None

    @property
    def members(self) -> tuple[NodeState, ...]:
        """The incarnations of the current world, lost ones included until they are replaced; by group rank."""
        if self.world is None:
            return ()
        members = self.world.members
        by_group_rank = sorted(members, key=lambda rank: members[rank].group_rank)
        return tuple(node for rank in by_group_rank if self.is_member(node := self.nodes[rank]))

    def is_current(self, sender: NodeIdentity) -> bool:
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
    def stalled(self) -> tuple[NodeState, ...]:
        """Members that have stepped in the current world and are stalled; by group rank."""
        world = self.world
        if world is None:
            return ()
        # Asked for each of a thousand nodes that fail at once: the few come first.
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
        """The last interruption; observations are none."""
        return next((one for one in reversed(self.incidents) if one.observation is None), None)
