"""Requests to backends and their answers: arguments and results of activities, and the events that watches signal."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field, JsonValue

from perdure.contract.base import Message, ShortText, Time, Vocabulary
from perdure.contract.identity import Incarnation, NodeCredentials, NodeId
from perdure.contract.vocabulary import LossCause
from perdure.spec.accepted import AcceptedSpec
from perdure.spec.durations import Duration
from perdure.spec.quantities import quantity_of_bytes
from perdure.spec.roles import Role

__all__ = [
    "CreatedNode",
    "GatewayFacts",
    "GroupRef",
    "JobCheck",
    "NodeEvent",
    "NodeEventKind",
    "NodeEvents",
    "NodeRef",
    "NodeRequest",
    "NodeResize",
    "NodeResized",
    "NodesCreated",
    "NodesDeleted",
    "NodesRef",
    "NodesRequest",
    "RequestedNode",
    "SiteFacts",
    "SiteReport",
    "WatchRequest",
]


class RequestedNode(Message):
    """The part of a request that differs between the nodes of a group."""

    node: NodeCredentials
    name: str
    """Deterministic: see `perdure.contract.names.node_name`."""
    task_queue: str
    """The node's own task queue."""
    avoids: tuple[str, ...] = ()
    """Machines that the node should avoid."""
    cpu: str | None = None
    """Processors that it requests, as a quantity; None for `resources.cpu` of the specification."""
    memory: int | None = None
    """Bytes of memory that it requests; None for `resources.memory` of the specification."""


class NodesOwner(Message):
    """The part of a request that is the same for all nodes of a group: the job, and the group."""

    spec: AcceptedSpec
    job_id: str
    job_first_run_id: str
    group_id: str
    nodes_min: int | None = None
    """The minimum number of nodes after a scale request; None where the spec's value applies."""


class NodeRequest(RequestedNode, NodesOwner):
    """Argument of `create_node`: everything that a backend needs. Repeating the request creates no second node."""

    @property
    def role(self) -> Role:
        """The node's role, with the memory and the processors that this node requests."""
        role = self.spec.roles[self.node.role]
        memory = None if self.memory is None else quantity_of_bytes(self.memory)
        update = {name: text for name, text in (("cpu", self.cpu), ("memory", memory)) if text is not None}
        return role.model_copy(update={"resources": role.resources.model_copy(update=update)}) if update else role

    @property
    def minimum(self) -> int:
        """The minimum number of nodes that the role works with."""
        return self.nodes_min or self.spec.roles[self.node.role].nodes.min


class NodesRequest(NodesOwner):
    """Argument of `create_nodes`: many nodes of one group."""

    nodes: tuple[RequestedNode, ...]

    @property
    def each(self) -> tuple[NodeRequest, ...]:
        """One request per node."""
        return tuple(NodeRequest(**node.part(RequestedNode), **self.part(NodesOwner)) for node in self.nodes)


class NodeRef(NodeId):
    """One incarnation of a node, for a backend."""

    name: str
    backend: str
    namespace: str
    grace: Duration = timedelta(seconds=30)
    """From SIGTERM to SIGKILL when it is deleted."""
    winding_down: bool = False
    """Its group will create no more nodes: resources that the job's nodes share may be deleted with the last node."""
    replaced: bool = False
    """A newer incarnation of the node is desired: resources reserved for the node may be kept for it."""


class NodeResize(NodeRef):
    """Argument of `resize_node`: one incarnation that runs, and what it is to have."""

    memory: int
    """Bytes of memory, as its request and its limit."""


class NodeResized(Message):
    """Result of `resize_node`."""

    problem: ShortText = ""
    """Why it does not have that, and will not soon; empty where it has."""


class NodesRef(Message):
    """Argument of `delete_nodes`: nodes of one group."""

    nodes: tuple[NodeRef, ...]


class NodesDeleted(Message):
    """Result of `delete_nodes`."""

    left: dict[str, ShortText] = Field(default_factory=dict)
    """What the backend's system still has of nodes, where and why, by their names: no process of theirs runs any more
    as far as that can be known, and the system removes it later."""


class GroupRef(Message):
    """Argument of `clear_group`: a group that ends and whose resources must all be deleted."""

    uid: str
    role: str
    group: int
    backend: str
    namespace: str
    job: str = ""
    """The job's name; releases up to 0.3 have none."""
    grace: Duration
    """As in `NodeRef`."""


class CreatedNode(Message):
    name: str
    """As its backend knows it: a pod's name, for example."""
    host: str = ""
    log_path: str = ""
    pending: ShortText = ""
    """Why the node cannot run yet; empty where it can."""
    altered: ShortText = ""
    """How its backend's system has made it otherwise than it was requested, for users."""


class NodesCreated(Message):
    """Result of `create_nodes`. The group requests a node that is in neither table again, by itself."""

    created: dict[int, CreatedNode]
    """The created nodes, by rank."""
    refused: dict[int, ShortText]
    """Why the backend will never create the node, by rank."""


class NodeEventKind(Vocabulary):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    GONE = "GONE"
    """Its processes have ended or it was removed; nothing of it runs any more."""
    UNKNOWN = "UNKNOWN"
    """A kind that only a newer worker's backend knows: it proves that the node was seen, and nothing else."""


class NodeEvent(Incarnation):
    """A fact from the backend about one incarnation."""

    kind: NodeEventKind
    time: Time
    reason: ShortText = ""
    queued: bool = False
    """Set with PENDING only: the node has no machine, because a queue has not admitted it or no machine has room. That
    may take hours and is not a failure."""
    refused: bool = False
    """Set with PENDING and GONE only: neither this node nor a replacement can ever run, whatever happens in the
    cluster. With the cause JOB, the specification must change."""
    absent: bool = False
    """Set with PENDING only: the node does not exist, because its backend could not create it yet. The group requests
    it again."""
    host: ShortText = ""
    """The machine of a GONE node, if known."""
    out_of_memory: bool = False
    """Set with GONE only: what the node may use of its machine's memory had run out."""
    cause: LossCause = LossCause.UNKNOWN
    """Why a GONE node was lost."""


class NodeEvents(Message):
    """Signal `node_events` of NodeGroup, sent by its watch."""

    events: tuple[NodeEvent, ...] = ()
    owner_closed: bool = False
    """The job that owns the group has closed: wind down."""


class WatchRequest(Message):
    """Argument of `watch_nodes`. A watch begins with a full list, so that nothing between two watches is missed."""

    group_id: str
    job_id: str
    job_first_run_id: str
    uid: str
    role: str
    group: int
    backend: str
    namespace: str
    owner_check: Duration
    known: tuple[Incarnation, ...] = ()
    """Nodes that existed and are not known to be lost. The watch reports those that no longer exist."""


class SiteFacts(Message):
    """Result of `site_facts`, which each later run of a job calls: facts about the Temporal namespace that the worker
    has determined."""

    search_attributes: bool
    """Perdure's search attributes exist; setting one that does not exist would block the workflow forever."""
    backends: tuple[str, ...] = ()
    """Backends that this worker serves."""


class GatewayFacts(Message):
    """How machines reach the site's gateway."""

    address: str = ""
    """`host:port` that machines outside of the cluster reach; empty if unknown."""
    authority: str
    """The certificate, in PEM, of the authority that issues the gateway's certificate."""
    server_name: str = ""
    """The name in that certificate; empty: the one that Perdure's own authority certifies."""


class SiteReport(Message):
    """Result of `site_report`, for people: what the worker that answers is configured to allow."""

    policies: dict[str, dict[str, JsonValue]]
    """The site policy of each backend that has one, by the backend's name."""
    gateway: GatewayFacts | None = None
    """Where machines join that do not reach Temporal; None if this worker does not know."""


class JobCheck(Message):
    """Result of `check_job`, which the first run of a job calls."""

    facts: SiteFacts
    problem: str = ""
    """The error in the specification that the job was started with; empty where it is valid."""
