"""Requests to backends and their answers: activities of the worker, and the facts that its watches signal."""

from __future__ import annotations

from datetime import timedelta

from perdure.spec.accepted import AcceptedSpec
from perdure.spec.durations import Duration
from workflows.messages.agents import NodeIdentity
from workflows.messages.base import Message, ShortText, Time, Vocabulary
from workflows.messages.vocabulary import LossCause


class NodeRequest(Message):
    """Argument of `create_node`: all that a backend needs; the same request twice makes one node."""

    node: NodeIdentity
    name: str
    """Deterministic: see `workflows.names.node_name`."""
    spec: AcceptedSpec
    job_id: str
    job_first_run_id: str
    group_id: str
    task_queue: str
    """The node's own."""
    nodes_min: int | None = None
    """The fewest nodes that the job trains with now, where that is not as its spec has it: it was scaled."""
    avoids: tuple[str, ...] = ()
    """Machines that it should avoid."""

    @property
    def minimum(self) -> int:
        """The fewest nodes that the job trains with."""
        return self.nodes_min or self.spec.role[1].nodes.min


class NodeOrder(Message):
    """What tells the nodes of one request apart. See `NodeRequest`."""

    node: NodeIdentity
    name: str
    task_queue: str
    avoids: tuple[str, ...] = ()


class NodesRequest(Message):
    """Argument of `create_nodes`: many nodes of one group."""

    orders: tuple[NodeOrder, ...]
    spec: AcceptedSpec
    job_id: str
    job_first_run_id: str
    group_id: str
    nodes_min: int | None = None

    @property
    def each(self) -> tuple[NodeRequest, ...]:
        """One request per node."""
        return tuple(
            NodeRequest(
                node=order.node,
                name=order.name,
                task_queue=order.task_queue,
                avoids=order.avoids,
                spec=self.spec,
                job_id=self.job_id,
                job_first_run_id=self.job_first_run_id,
                group_id=self.group_id,
                nodes_min=self.nodes_min,
            )
            for order in self.orders
        )


class NodeRef(Message):
    """One incarnation of a node, for a backend."""

    name: str
    uid: str
    role: str
    rank: int
    incarnation: int
    backend: str
    namespace: str
    grace: Duration = timedelta(seconds=30)
    """From SIGTERM to SIGKILL when it is deleted."""
    winding_down: bool = False
    """Its group will create no other: what the job's nodes share may go with the last of them."""
    replaced: bool = False
    """A newer incarnation of it is desired: what was reserved for it may be kept for that."""


class NodesRef(Message):
    """Argument of `delete_nodes`: nodes of one group."""

    nodes: tuple[NodeRef, ...]


class GroupRef(Message):
    """Argument of `clear_group`: a group that ends, and of which nothing may be left."""

    uid: str
    role: str
    group: int
    backend: str
    namespace: str
    grace: Duration
    """As in `NodeRef`."""


class CreatedNode(Message):
    name: str
    address: str = ""
    host: str = ""
    log_path: str = ""
    pending: ShortText = ""
    """Why it cannot run yet; empty where it can."""


class NodesCreated(Message):
    """Result of `create_nodes`. A node in neither of the two is to be requested again, by itself."""

    created: dict[int, CreatedNode]
    """By rank."""
    refused: dict[int, ShortText]
    """By rank, why it never will be."""


class NodeEventKind(Vocabulary):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    GONE = "GONE"
    """Its processes have ended or it was removed; nothing of it runs any more."""
    UNKNOWN = "UNKNOWN"
    """Of a newer worker's backend: it says that the node was seen, and nothing else."""


class NodeEvent(Message):
    """A fact from the backend about one incarnation."""

    kind: NodeEventKind
    rank: int
    incarnation: int
    time: Time
    reason: ShortText = ""
    queued: bool = False
    """Of PENDING: no machine is given to it, since a queue has not admitted it or none has room. That may take hours,
    and is not a failure."""
    refused: bool = False
    """Of PENDING and GONE: neither it nor another one in its place can run, whatever happens in the cluster. With the
    cause JOB it is the specification that must change."""
    absent: bool = False
    """Of PENDING: it does not exist, since its backend could not make it yet; it is requested again."""
    exit_code: int | None = None
    signal: int | None = None
    host: str = ""
    """Of GONE: the machine that it was on, where that is known."""
    cause: LossCause = LossCause.UNKNOWN
    """Of GONE: whose doing it was."""


class NodeEvents(Message):
    """Signal `node_events` of NodeGroup, sent by its watch."""

    events: tuple[NodeEvent, ...] = ()
    owner_closed: bool = False
    """The job that owns the group has closed: wind down."""


class KnownNode(Message):
    """One incarnation that exists, as far as the reporting process knows."""

    rank: int
    incarnation: int


class WatchRequest(Message):
    """Argument of `watch_nodes`. It starts with a full list, so that nothing between two watches is missed."""

    group_id: str
    job_id: str
    job_first_run_id: str
    uid: str
    role: str
    group: int
    backend: str
    namespace: str
    owner_check: Duration
    known: tuple[KnownNode, ...] = ()
    """Nodes that were there and are not known to be lost: the watch tells of those that are there no more."""


class SiteFacts(Message):
    """Result of `site_facts`, which each later run of a job calls: what the worker found out about its Temporal
    namespace when it started."""

    search_attributes: bool
    """Perdure's search attributes exist; setting one that does not exist would block the workflow forever."""
    backends: tuple[str, ...] = ()
    """Backends that this worker serves."""


class JobCheck(Message):
    """Result of `check_job`, which the first run of a job calls."""

    facts: SiteFacts
    problem: str = ""
    """What is wrong with the specification that the job was started with; empty where nothing is."""
