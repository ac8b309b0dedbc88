"""The machines of a cluster, the nodes that jobs have on them, and the nodes that jobs are advised to have."""

from __future__ import annotations

from pydantic import Field

from perdure.contract.base import Message, ShortText, Time, Vocabulary
from perdure.contract.scaling import Pace, Suggestion
from perdure.contract.vocabulary import JobPhase

__all__ = [
    "ClusterJob",
    "ClusterRef",
    "ClusterSummary",
    "ClusterView",
    "Exchange",
    "Holding",
    "Machine",
    "MachineShape",
    "NodesSuggested",
    "RoomSeen",
    "SharingPolicy",
]


class SharingPolicy(Vocabulary):
    """What the nodes of a cluster are shared for."""

    THROUGHPUT = "throughput"
    """Nodes go where they add most, by priority and by what a job has missed."""
    FAIR = "fair"
    """All jobs have as much of what they asked for as possible."""
    PRIORITY = "priority"
    """Jobs of a higher priority have all that they can use before others have more than their fewest."""
    UNKNOWN = "UNKNOWN"
    """A policy that only a newer release knows: its worker advises."""


class ClusterRef(Message):
    """Argument of the workflow that watches a cluster, and of its activity."""

    backend: str


class Holding(Message):
    """The nodes of one role on a machine."""

    namespace: str
    job: str
    role: str
    nodes: int


class Machine(Message):
    """One machine."""

    name: str
    capacity: dict[str, float] = Field(default={})
    """Its resources in their units, such as `cpu`, and `memory` in bytes; `nodes` where only their number is
    limited."""
    free: dict[str, float] = Field(default={})
    """What is left of them."""
    taints: tuple[str, ...] = ()
    """Taints that keep pods away which do not tolerate them."""
    problem: ShortText = ""
    """Why no node can start on it; empty where one can."""
    held: tuple[Holding, ...] = ()
    others: int = 0
    """Pods on it that belong to no job that the worker knows, and have resources."""


class MachineShape(Message):
    """Machines that are alike: the same capacity and taints."""

    machines: int
    capacity: dict[str, float] = Field(default={})
    taints: tuple[str, ...] = ()
    free: int = 0
    """Machines on which nothing runs that requests resources other than processors and memory, and on which nodes can
    start."""
    unusable: int = 0
    """Machines on which no node can start."""


class ClusterJob(Message):
    """A role of a job, with the nodes that it has of the cluster and what another one would bring it."""

    namespace: str
    job: str
    uid: str
    role: str
    phase: JobPhase
    nodes: int = 0
    """Nodes that are on machines."""
    waiting: int = 0
    """Nodes that are requested and not on a machine."""
    waits_for: ShortText = ""
    """Why one of them is not."""
    fewest: int = 1
    most: int = 1
    unit: int = 1
    requested: int = 0
    """Nodes that it requests."""
    started_at: Time
    shares: bool = False
    """It follows advice: `scaling.share`."""
    priority: float = 1.0
    """`scaling.priority`."""
    paces: tuple[Pace, ...] = ()
    """What it has measured."""
    global_batch: bool = False
    gain: float | None = None
    """How much faster another unit of nodes would make it, as a share; None where too little is measured, and where it
    takes no more."""
    room: int | None = None
    """Nodes like its own for which there is room, counted up to twice the number that any job may have; None where that
    is not known."""
    smaller: dict[str, str] = Field(default={})
    """What nodes that wait would request of `cpu` and `memory` by `scaling.relax`."""
    fits_smaller: bool | None = None
    """Whether a machine has room for a node that requests that; None where none waits for it."""
    pool: str = ""
    """Jobs of the same pool have nodes of the same resources: they can have each other's."""
    advised: Suggestion | None = None


class ClusterView(Message):
    """A cluster, as its worker sees it: the details of the heartbeats of the activity that watches it."""

    backend: str
    seen_at: Time
    machines: tuple[Machine, ...] = ()
    """Those of most interest first: with a problem, with nodes of jobs, others."""
    machines_total: int = 0
    shapes: tuple[MachineShape, ...] = ()
    jobs: tuple[ClusterJob, ...] = ()
    jobs_total: int = 0
    pods_waiting: int = 0
    """Pods that wait for a machine and are of no job that the worker knows."""
    events: int = 0
    """Changes that were taken in since the watch began."""
    sharing: SharingPolicy | None = None
    problem: ShortText = ""
    """Why less is known than could be; empty where nothing is missing."""


class ClusterSummary(Message):
    """What the cluster's workflow is told: the jobs that share it, and little else."""

    seen_at: Time
    machines: int = 0
    unusable: int = 0
    jobs: tuple[ClusterJob, ...] = ()
    sharing: SharingPolicy | None = None
    """What the nodes are shared for; None where jobs are not advised."""


class Exchange(Message):
    """Nodes that go from or to another job."""

    job: str
    """Its name, or words for it where it is of another namespace."""
    nodes: int


class RoomSeen(Message):
    """Argument of the signal `room_seen` of a job: whether a machine has room for nodes that request less."""

    uid: str
    role: str
    requests: dict[str, str]
    """What they would request of `cpu` and `memory`."""
    fits: bool


class NodesSuggested(Message):
    """Argument of the signal `suggest_nodes` of a job: advice, which the job follows as far as its range allows."""

    uid: str
    role: str
    nodes: int
    number: int = 0
    """Grows with each advice; an older one that arrives late is ignored."""
    free: int = 0
    """How many of the nodes that it gains no job has."""
    of: tuple[Exchange, ...] = ()
    """The jobs whose nodes it gains."""
    to: tuple[Exchange, ...] = ()
    """The jobs that gain its nodes."""
