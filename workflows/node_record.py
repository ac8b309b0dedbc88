"""One node as its group knows it: the table that a NodeGroup carries through continue-as-new."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from perdure.spec.accepted import AcceptedSpec
from workflows.messages import (
    CreatedNode,
    GroupDesire,
    Message,
    Metrics,
    NodeIdentity,
    NodePhase,
    NodeTransition,
    NodeView,
    Progress,
    Ready,
    Stall,
)
from workflows.messages.base import Time


class NodeRecord(Message):
    """The newest incarnation of one node, and what its agent said last."""

    node: NodeIdentity
    phase: NodePhase = NodePhase.REQUESTED
    since: datetime
    reason: str = ""
    obstacle: str = ""
    """Why its backend cannot start its command, although the node has a machine: its agent may speak all the same."""
    created: CreatedNode | None = None
    watched: bool = False
    """The backend's watch has reported it, or knew it when it began: the watch will not miss its end."""
    address: str = ""
    host: str = ""
    log_path: str = ""
    """As its agent has it, where the backend does not know."""
    joined: bool = False
    """Its agent has reported at least once: it can hold a lease."""
    reachable: bool = True
    epoch: int = 0
    """Of its newest lease."""
    holder_started_at: datetime | None = None
    """Start time of the agent that was heard last: another one means that the agent was restarted."""
    rewordings: int = 0
    """How often the job was told another reason why the node is pending."""
    reworded_at: Time | None = None
    renewed: bool = False
    """The agent was heard anew since the current lease was scheduled: a loss of that lease is old news."""
    processes: int = 1
    store_ports: tuple[int, ...] = ()
    command_nodes: str | None = None
    """As in `Ready`."""
    joining: Ready | None = None
    """Its word that it is ready for a world that trains already, until it has shown that it gets there."""
    cut_off: str = ""
    """Why it does not, as far as that was told."""
    generation: int = 0
    """The newest that its agent has accepted, or spoken of."""
    refused: int = 0
    """The newest generation that its agent has refused: an agent that restarts is asked again."""
    inquired: int = 0
    """The newest inquiry of the job that its agent has answered."""
    completed: int = 0
    """The newest generation that its agent knows to be complete."""
    command_restarts: int = 0
    """The newest restart of its command that its agent has followed."""
    stepping: int = 0
    """The newest generation that it runs or steps in."""
    stepped: int = 0
    """The newest generation that it was seen to step in."""
    progress: Progress | None = None
    metrics: Metrics | None = None
    stall: Stall | None = None
    """The latest report of its agent about a stall."""
    heard: dict[str, int] = Field(default={})
    """Highest sequence number by kind of message: within a kind, older ones are dropped."""

    def changed(self, **fields: object) -> NodeRecord:
        return self.model_copy(update=fields)

    def view(self, *, group_rank: int | None, avoids: tuple[str, ...], with_token: bool = False) -> NodeView:
        return NodeView(
            rank=self.node.rank,
            incarnation=self.node.incarnation,
            phase=self.phase,
            token=self.node.token if with_token else "",
            reachable=self.reachable,
            host=self.host,
            address=self.address,
            reason=self.reason or self.obstacle,
            generation=self.generation,
            group_rank=group_rank,
            processes=self.processes,
            progress=self.progress,
            metrics=self.metrics,
            stalled_since=self.stall.since if self.stall and self.stall.generation == self.generation else None,
            store_ports=self.store_ports,
            command_nodes=self.command_nodes,
            since=self.since,
            avoids=avoids,
            log_path=self.log_path or (self.created.log_path if self.created else ""),
        )


class TransitionsCarried(Message):
    """What the group still has to tell its job."""

    waiting: tuple[NodeTransition, ...] = ()
    adopted: tuple[NodeView, ...] | None = None
    sequence: int = 0
    """Of the last message."""
    delivered: int = 0
    """Edges that the job has taken."""
    ownership_epoch: str = Field(default="", validation_alias="tenure", serialization_alias="tenure")


class GroupTable(Message):
    """All that a NodeGroup carries into its next run."""

    records: dict[int, NodeRecord] = Field(default={})
    retiring: tuple[NodeRecord, ...] = ()
    """Older incarnations that are being deleted."""
    transitions: TransitionsCarried = Field(
        default=TransitionsCarried(), validation_alias="edges", serialization_alias="edges"
    )
    owner_closed: bool = False
    """The job has closed without having said that the group is to wind down."""


class GroupInput(Message):
    """What a NodeGroup is started with."""

    job_id: str
    """The workflow ID of the job that owns it."""
    job_first_run_id: str
    uid: str
    group: int
    role: str
    spec: AcceptedSpec
    desire: GroupDesire
    ownership_epoch: str = Field(default="", validation_alias="tenure", serialization_alias="tenure")
    """See `GroupTransitions`."""
    table: GroupTable | None = None
    """From the run before; None for the first."""
