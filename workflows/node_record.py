"""One node as its group knows it: the table that a NodeGroup carries through continue-as-new."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from perdure.contract import (
    CheckpointRef,
    CopyReceiver,
    CreatedNode,
    GroupDesire,
    Message,
    NodeCredentials,
    NodeDesired,
    NodeFacts,
    NodePhase,
    NodeView,
    Ready,
    Stall,
    World,
)
from perdure.contract.base import Time
from perdure.contract.identity import identity_of
from perdure.contract.transitions import AnyTransition
from perdure.spec.accepted import AcceptedSpec


class NodeRecord(NodeFacts):
    """The newest incarnation of one node, with its agent's latest reports."""

    node: NodeCredentials
    obstacle: str = ""
    """Why its backend cannot start its command, although the node has a machine; its agent may report nevertheless."""
    created: CreatedNode | None = None
    memory: int | None = None
    """Bytes of memory that it was created with, or that its backend was asked last to give it; None for those of the
    specification, or where that is unknown."""
    watched: bool = False
    """The backend's watch has reported the node, or knew it when it began: the watch will not miss its end."""
    log_path: str = ""
    """The path that its agent reports, where the backend does not know it."""
    joined: bool = False
    """Its agent has reported at least once: it can hold a lease."""
    unreachable_since: Time | None = None
    """When its lease lapsed; None while it holds."""
    epoch: int = 0
    """The epoch of its newest lease."""
    leased_since: Time | None = None
    """When its newest lease was scheduled; None while none was."""
    silent_since: Time | None = None
    """Since when its agent has neither renewed nor taken a lease, if one ended for that; None once it takes one."""
    agent_started_at: datetime | None = None
    """Start time of the agent that reported last: a different one means that the agent was restarted."""
    rewordings: int = 0
    """The number of times that the job was sent another reason why the node is pending."""
    reworded_at: Time | None = None
    renewed: bool = False
    """The agent has reported since the current lease was scheduled: a loss of that lease is stale."""
    joining: Ready | None = None
    """Its report that it is ready for a world that trains already, kept until it has proved that it can connect."""
    waits: str = ""
    """What its command waits for before it starts."""
    copies: CopyReceiver | None = None
    """Where it takes copies of what other nodes' scripts have saved; None where it takes none."""
    unpacks_roles: bool = False
    """Its agent can read `packed_roles`."""
    cut_off: str = ""
    """Why it cannot connect, as last reported."""
    generation: int = 0
    """The newest generation that its agent has accepted, or reported."""
    version: int = 0
    """The version of the newest desired state that its agent was sent."""
    acknowledged: NodeDesired = NodeDesired()
    """What its agent has taken last; nothing after it was started again, as it does not carry on all of it."""
    committed_checkpoint: CheckpointRef | None = None
    """The checkpoint that its agent has committed last."""
    leaving: bool = False
    """It is being ended from outside, and waits for a checkpoint before it ends."""
    stepping: int = 0
    """The newest generation that it runs or steps in."""
    stepped: int = 0
    """The newest generation in which its steps were seen."""
    stall: Stall | None = None
    """The latest stall report of its agent."""
    sequences: dict[str, int] = Field(default={})
    """Highest sequence number by kind of message: within a kind, older ones are dropped."""

    @property
    def reachable(self) -> bool:
        """Whether its lease holds, or was never taken."""
        return self.unreachable_since is None

    @property
    def reports(self) -> bool:
        """Whether its agent has reported, and it is not known to be lost."""
        return self.joined and self.phase is not NodePhase.LOST

    def view(self, *, group_rank: int | None, avoids: tuple[str, ...], with_token: bool = False) -> NodeView:
        altered = self.created.altered if self.created else ""
        shown = self.replace(reason=self.reason or self.obstacle or self.waits or altered)
        return NodeView(
            **identity_of(self.node),
            **shown.part(NodeFacts),
            token=self.node.token if with_token else "",
            reachable=self.reachable,
            generation=self.generation,
            group_rank=group_rank,
            stalled_since=self.stall.since if self.stall and self.stall.generation == self.generation else None,
            avoids=avoids,
            log_path=self.log_path or (self.created.log_path if self.created else ""),
        )


class TransitionsCarried(Message):
    """Transitions that the group still has to send to its job."""

    waiting: tuple[AnyTransition, ...] = ()
    adopted: tuple[NodeView, ...] | None = None
    declined: bool = False
    """`adopted` answers a desired state that was not taken."""
    world: World | None = None
    """The world of `adopted`."""
    sequence: int = 0
    """The sequence number of the last message."""
    delivered: int = 0
    """The number of transitions that the job has accepted."""
    runs: tuple[str, ...] = ()
    """The runs that may have sent the last message which has reached the job."""
    begins: bool = False
    """The job does not know yet that the group was reset, or may have been."""
    ownership_epoch: str = ""


class GroupTable(Message):
    """Everything that a NodeGroup carries into its next run."""

    records: dict[int, NodeRecord] = Field(default={})
    retiring: tuple[NodeRecord, ...] = ()
    """Older incarnations that are being deleted."""
    transitions: TransitionsCarried = TransitionsCarried()
    owner_closed: bool = False
    """The job has closed without telling the group to wind down."""
    datasets: tuple[str, ...] = ()
    """Datasets that the group was asked to start."""
    copy_targets: dict[int, int] = Field(default={})
    """By rank, the rank that keeps the copies of what its script has saved."""
    last_world: World | None = None
    """The newest world before the present desired state, without its members."""


class GroupInput(Message):
    """The argument of a NodeGroup."""

    job_id: str
    """The workflow ID of the job that owns it."""
    job_first_run_id: str
    uid: str
    group: int
    role: str
    spec: AcceptedSpec
    desire: GroupDesire
    ownership_epoch: str = ""
    """See `GroupTransitions`."""
    table: GroupTable | None = None
    """The table of the run before; None for the first run."""
