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
    NodePhase,
    Progress,
    World,
)


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
    """Machines that it was asked to keep away from."""
    queued: bool = False
    """Pending, and no machine is given to it: its queue has not admitted it, or none has room."""
    reachable: bool = True
    host: str = ""
    address: str = ""
    processes: int = 1
    store_ports: tuple[int, ...] = ()
    """Ports that it listens on and that no generation of ours has used."""
    used_ports: tuple[int, ...] = ()
    """Given away, and still in reports that were on their way."""
    commanded: int = 0
    """The newest generation that its agent has accepted."""
    stepping: int = 0
    """The newest generation that it has stepped in."""
    finished: int = 0
    """The newest generation that all its ranks finished."""
    stalled_in: int = 0
    """The generation in which its ranks stand still; 0 for none."""
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


class NodeFailure(Message):
    """What one node reported about the generation that broke."""

    rank: int
    failure: FailureClass
    time: datetime
    """When it happened."""
    exit_code: int | None = None
    text: str
    """For people."""
    log_tail: str = ""
    certain: bool = True
    """False where only an exit code is known: it may be a victim that told nobody why it failed."""


class Interruption(Message):
    """Why the current world is over: gathered until a decision is made."""

    since: datetime
    """When the job first heard of it."""
    failures: tuple[NodeFailure, ...] = ()
    requested: str | None = None
    """Why a new world is wanted although nothing has failed, in words."""
    by_user: bool = False
    """A user asked for it; otherwise capacity came or went."""
    decided: bool = False
    """Only nodes for the next world are still missing."""
    counted: bool = False
    """Its restart is in the budgets: news may change the decision, but it stays one restart."""

    def ranks_with(self, *failures: FailureClass) -> frozenset[int]:
        """The nodes (slots) that reported one of these."""
        return frozenset(failure.rank for failure in self.failures if failure.failure in failures)


class Outcome(Message):
    """How the job ends; the nodes are wound down before it closes."""

    phase: JobPhase
    exit_code: int
    reason: str
    decided_at: datetime
    held_until: datetime | None = None
    """Until then the nodes are kept for looking at: see `workflows.policy.holding`."""


class JobState(Message):
    """One job. `workflows.policy.job.decide` is the only writer."""

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
    """The newest one given to anybody."""
    world: World | None = None
    world_decided_at: datetime | None = None
    interruption: Interruption | None = None
    """Set from the first sign that the current world is over until the next one is handed out."""
    complete_generation: int = 0
    suspended: bool = False
    asked_for: dict[int, str] = Field(default={})
    """By node (slot): the user's wish that makes it come or go, until a world has followed."""
    waiting_since: datetime | None = None
    """Since when no world can be formed, although it is not the queue that keeps the first one waiting."""
    queued_since: datetime | None = None
    """Since when the first world waits in the queue, with what was waited for other reasons in between."""
    ready_since: datetime | None = None
    """Since when a (larger) world could be formed: the last call counts from here."""
    incidents: tuple[IncidentView, ...] = ()
    incident_count: int = 0
    losses: tuple[MachineLoss, ...] = ()
    """What speaks against machines, in the order that nodes were replaced: see `workflows.policy.suspicion`."""
    restarts: tuple[datetime, ...] = ()
    """Times of restarts that failures caused, within the budget's window."""
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
    tenures: dict[int, str] = Field(default={})
    """By group: the newest start or adoption of it."""
    outcome: Outcome | None = None

    def changed(self, **fields: object) -> Self:
        return self.model_copy(update=fields)

    def stopped(self, outcome: Outcome) -> Self:
        """It is decided how the job ends."""
        return self.changed(outcome=outcome, interruption=None)

    def with_node(self, node: NodeState) -> Self:
        return self.changed(nodes={**self.nodes, node.rank: node})

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

    def is_member(self, node: NodeState) -> bool:
        """Whether this incarnation is part of the current world."""
        member = self.world.members.get(node.rank) if self.world is not None else None
        return member is not None and member.incarnation == node.incarnation

    @property
    def stepping(self) -> bool:
        """Every member of the world steps in it, or has finished."""
        world = self.world
        return world is not None and all(
            self.is_member(node := self.nodes[rank]) and max(node.stepping, node.finished) >= world.generation
            for rank in world.members
        )

    @property
    def stalled(self) -> tuple[NodeState, ...]:
        """Members that have stepped in the current world and stand still; by group rank."""
        world = self.world
        return tuple(node for node in self.members if world and node.alive and node.stalled_in == world.generation)

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
        """The last incident, while its world does not step yet."""
        if self.incidents and self.incidents[-1].stepping_at is None:
            return self.incidents[-1]
        return None
