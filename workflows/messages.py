"""Everything that crosses a boundary of the control plane: one model per signal, update, query and activity argument.

Only additive changes: a running job may hold messages of an older release in its history, and an agent of an older
release may stand beside a newer worker. So unknown fields are ignored, and a new field has a default.

Times are of the event, in UTC, set where it happened; graces count from them and never from the time of arrival.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from perdure.spec.durations import Duration
from perdure.spec.job import JobSpec


class Message(BaseModel):
    """A value: immutable, and tolerant of fields from a newer release."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


# Vocabulary


class JobPhase(StrEnum):
    """Where a job stands, for people, dashboards and the search attribute `JobPhase`."""

    STARTING = "STARTING"
    """Nodes are being created, or are not yet ready for a world."""
    WAITING = "WAITING"
    """Fewer than `min` nodes can run: the job waits for capacity."""
    RENDEZVOUS = "RENDEZVOUS"
    """A world was handed out and does not step yet."""
    RUNNING = "RUNNING"
    """Every member of the world steps, or runs where steps cannot be seen."""
    RECOVERING = "RECOVERING"
    """A failure interrupted the world; the next one is under way."""
    SUSPENDED = "SUSPENDED"
    """No nodes, by a user's wish; the job's history and budgets are kept."""
    STOPPING = "STOPPING"
    """Nodes are being wound down before the job closes."""
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class NodePhase(StrEnum):
    """Where one incarnation of a node stands."""

    REQUESTED = "REQUESTED"
    """The backend was asked for it."""
    PENDING = "PENDING"
    """The backend has accepted it and cannot run it yet; the reason is kept."""
    CREATED = "CREATED"
    """It exists; its agent has not spoken."""
    JOINED = "JOINED"
    """Its agent has spoken; the command is on its way to the rendezvous."""
    READY = "READY"
    """It can enter a world, or is in one."""
    LOST = "LOST"
    """Its processes are gone, by evidence. A new incarnation may follow."""
    REMOVED = "REMOVED"
    """Taken away because the job no longer wants it."""


class FailureClass(StrEnum):
    """What a failure means; the policy acts on this and on nothing finer."""

    USER_CODE = "USER_CODE"
    """The script raised or exited with a code of its own: the same will probably happen again."""
    CRASH = "CRASH"
    """A rank died of SIGSEGV, SIGABRT, SIGBUS, SIGFPE or SIGILL."""
    KILLED = "KILLED"
    """A rank was ended by SIGKILL or SIGTERM from outside."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """Host or device memory ran out."""
    PEER_LOST = "PEER_LOST"
    """A victim: the rank failed because another one went away."""
    LAUNCH = "LAUNCH"
    """The command could not be started: not found, not executable, refused options."""
    COMMAND_LOST = "COMMAND_LOST"
    """The command (torchrun itself) died under healthy ranks."""
    UNPROTECTED = "UNPROTECTED"
    """A rank appeared on one of several nodes without having gone through our rendezvous."""
    NODE_LOST = "NODE_LOST"
    """The node's processes, pod or machine are gone."""
    NODE_UNRESPONSIVE = "NODE_UNRESPONSIVE"
    """The node answers neither its lease nor commands while its world stands still."""
    CREATE_FAILED = "CREATE_FAILED"
    """The backend refused the node for good."""
    RENDEZVOUS_TIMEOUT = "RENDEZVOUS_TIMEOUT"
    """A member did not enter a world in time."""


class EvidenceSource(StrEnum):
    """Who says so. Independent sources raise confidence."""

    AGENT = "AGENT"
    BACKEND = "BACKEND"
    LEASE = "LEASE"
    COMMAND = "COMMAND"
    PEERS = "PEERS"
    USER = "USER"


class ProgressSource(StrEnum):
    """How far the step number can be trusted."""

    REPORTED = "REPORTED"
    """The script says it through `perdure.training.report`: absolute and exact."""
    COUNTED = "COUNTED"
    """Optimizer steps since the process started: says alive, not how far."""


# Agents to workflows


class NodeIdentity(Message):
    """One incarnation of one node."""

    uid: str
    """Of the job's run; 8 hexadecimal digits."""
    role: str
    rank: int = Field(ge=0)
    """The node's slot in its role, 0 to max-1; it outlives incarnations. The rank inside a world is `group_rank`."""
    incarnation: int = Field(ge=1)
    token: str
    """A secret of this incarnation: agents prove themselves with it, and commands to the agent carry it."""


class AgentMessage(Message):
    """What every message of an agent carries, so that repeats, reorderings and the past are recognised."""

    sender: NodeIdentity
    sequence: int = Field(ge=1)
    """Counts per destination, and over restarts of the agent."""
    time: datetime
    """When it happened."""


class Progress(Message):
    """How far the ranks of one node are; the slowest rank counts."""

    step: int = 0
    total_steps: int | None = None
    """Steps that the script intends; only where it reports them."""
    steps_per_second: float | None = None
    """Over the last minute or since the generation began, whichever is shorter."""
    loss: float | None = None
    source: ProgressSource = ProgressSource.COUNTED
    generation_steps: int = 0
    """Steps seen in the current generation."""
    last_step_at: datetime | None = None


class Joined(AgentMessage):
    """An agent's first word, said again whenever it restarts. To the NodeGroup."""

    agent_started_at: datetime
    address: str
    """Where other nodes reach this one: a pod's IP, or 127.0.0.1."""
    host: str = ""
    """The machine's name, for people."""
    generation: int = 0
    """The newest generation that this node has been told of; 0 for none. Agents refuse lower ones."""
    agent_version: str = ""


class Ready(AgentMessage):
    """The node's command waits for a world. To the NodeGroup."""

    after_generation: int = 0
    """The newest generation that it has already been in."""
    store_ports: tuple[int, ...] = ()
    """Ports on which this node already listens, each for the store of one generation."""
    processes: int = Field(default=1, ge=1)
    """Ranks that this node will start."""
    command_nodes: str | None = None
    """`--nnodes` as the command itself was given it, where that differs from what we asked for."""


class Stepping(AgentMessage):
    """All ranks of the node made their first step in a generation, or run where steps cannot be seen. To the
    NodeGroup."""

    generation: int
    entered_at: datetime | None = None
    """When the node's handler returned the world: what follows is process start."""


class LeaseTaken(AgentMessage):
    """The agent holds the lease of this epoch: it is back. To the NodeGroup."""

    agent_started_at: datetime
    epoch: int


class Heartbeat(AgentMessage):
    """To the NodeGroup, within its signal budget."""

    generation: int = 0
    progress: Progress | None = None
    store_ports: tuple[int, ...] = ()


class DeviceUsage(Message):
    index: int
    name: str = ""
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None


class Metrics(AgentMessage):
    """What the training processes use. To the NodeGroup, with every n-th heartbeat."""

    cpu_cores: float | None = None
    """CPU-seconds per second."""
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    devices: tuple[DeviceUsage, ...] = ()


class RankExit(Message):
    """One rank that ended badly."""

    local_rank: int
    global_rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    """None where a signal ended it."""
    signal: int | None = None
    error: str | None = None
    """From the rank's torch error file: the exception's type and message, on one line."""
    traceback: str | None = None
    """Its last lines; at most 2,000 characters."""
    time: datetime | None = None


class FailureKind(StrEnum):
    RANKS = "RANKS"
    """Ranks ended; torchrun is alive and asks for the next world."""
    COMMAND = "COMMAND"
    """The command itself ended."""
    UNPROTECTED = "UNPROTECTED"
    """Ranks without a rendezvous; the agent has stopped them."""


class Failure(AgentMessage):
    """Something ended on a node. To the TrainingJob, at once, never dropped."""

    generation: int
    """The one that it happened in; 0 before the first."""
    kind: FailureKind
    ranks: tuple[RankExit, ...] = ()
    exit_code: int | None = None
    """Of the command."""
    signal: int | None = None
    """That ended the command."""
    message: str = ""
    """One line for people."""
    log_tail: str = ""
    """The last lines of the command's output; at most 4,000 characters."""
    progress: Progress | None = None
    store_ports: tuple[int, ...] = ()
    out_of_memory: bool = False
    """The node's memory controller counted an OOM kill."""


class Finished(AgentMessage):
    """All ranks of this node ended with 0 in this generation. To the TrainingJob."""

    generation: int
    progress: Progress | None = None


# Group to job, and job to group


class EdgeKind(StrEnum):
    """What changed about a node."""

    CREATED = "CREATED"
    PENDING = "PENDING"
    JOINED = "JOINED"
    READY = "READY"
    STEPPING = "STEPPING"
    STORE_PORTS = "STORE_PORTS"
    COMMANDED = "COMMANDED"
    """The agent has accepted a world."""
    UNREACHABLE = "UNREACHABLE"
    REACHABLE = "REACHABLE"
    UNRESPONSIVE = "UNRESPONSIVE"
    """A command for the current generation was not taken."""
    LOST = "LOST"
    CREATE_FAILED = "CREATE_FAILED"
    REMOVED = "REMOVED"


class NodeEdge(Message):
    """One change of one node, as its group saw it."""

    kind: EdgeKind
    rank: int
    incarnation: int
    time: datetime
    source: EvidenceSource = EvidenceSource.AGENT
    detail: str = ""
    generation: int = 0
    entered_at: datetime | None = None
    store_ports: tuple[int, ...] | None = None
    processes: int | None = None
    address: str | None = None
    host: str | None = None
    command_nodes: str | None = None


class GroupEdges(Message):
    """To the TrainingJob: what changed in one group since its last message."""

    uid: str
    """Of the job's run: a later job of the same name ignores the groups of an earlier one."""
    group: int
    sequence: int
    edges: tuple[NodeEdge, ...] = ()
    adopted: tuple[NodeView, ...] | None = None
    """The whole table: the answer to `adopt`, for a job that was reset or replaced."""
    wound_down: bool = False
    """Nothing of the group is left."""


class DesiredNode(Message):
    incarnation: int
    token: str


class Member(Message):
    incarnation: int
    """A node that takes a lost member's place is not a member before the next generation."""
    group_rank: int
    """The node's rank in the world: torch's GROUP_RANK."""
    base_rank: int
    """The global rank of the node's first process."""
    processes: int


class World(Message):
    """One generation: who trains together. Constant for all members but for their `Member`."""

    generation: int = Field(ge=1)
    members: dict[int, Member]
    """By node rank (slot)."""
    store_address: str
    store_port: int
    store_rank: int
    """The node (slot) that hosts the store."""

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def processes(self) -> int:
        """torch's WORLD_SIZE."""
        return sum(member.processes for member in self.members.values())


class GroupDesire(Message):
    """To a NodeGroup: all that the job wants of it now. A later one replaces an earlier one."""

    version: int
    """Only ever grows; an older desire that arrives late is ignored."""
    nodes: dict[int, DesiredNode]
    world: World | None = None
    """Only the members of this group matter to it; the rest is counted."""
    world_size: int = 0
    world_nodes: int = 0
    complete_generation: int = 0
    """Every rank of the world finished this generation: let torchrun leave its exit barrier."""
    wind_down: bool = False
    """Delete everything and close."""
    reason: str = ""
    """Shown in the Temporal UI on what this desire causes."""


class Adopt(Message):
    """To a NodeGroup that already runs: a job that starts over (reset, or a lost parent) takes it on."""

    job_run_id: str


class LeaseView(Message):
    """An agent's freshest word, in the heartbeat details of its lease: costs no history."""

    epoch: int
    generation: int = 0
    state: str = ""
    progress: Progress | None = None
    time: datetime | None = None


class NodeView(Message):
    """A node as the query `nodes` shows it."""

    rank: int
    incarnation: int
    phase: NodePhase
    token: str = ""
    """Empty in queries: only `adopted` carries it."""
    reachable: bool = True
    host: str = ""
    address: str = ""
    reason: str = ""
    """Of PENDING and LOST."""
    generation: int = 0
    group_rank: int | None = None
    """Its rank in the current world; None where it is not a member."""
    processes: int = 1
    progress: Progress | None = None
    metrics: Metrics | None = None
    store_ports: tuple[int, ...] = ()
    since: datetime | None = None
    """When the phase began."""
    log_path: str = ""
    """Where the backend keeps its log, where that is a path."""


# Commands: activities on a node's own queue


class LeaseRequest(Message):
    """Argument of `hold_lease`. Returns only when cancelled or superseded."""

    node: NodeIdentity
    epoch: int
    heartbeat: Duration
    signal_interval: Duration
    """How often the agent may send its heartbeat signal: the group's budget, shared."""


class ApplyWorld(Message):
    """Argument of `apply_world`: constant in size, below 500 bytes. The command must run for this generation: the
    agent has it started where it is not, and restarted where it is in an older one."""

    node: NodeIdentity
    generation: int
    nodes: int
    group_rank: int
    base_rank: int
    world_size: int
    store_address: str
    store_port: int
    store_host: bool
    """This node hosts the generation's store."""


class CommandAnswer(Message):
    accepted: bool
    generation: int = 0
    """The newest one that the agent knows."""
    detail: str = ""


class CompleteGeneration(Message):
    """Argument of `complete_generation`."""

    node: NodeIdentity
    generation: int


class StopNode(Message):
    """Argument of `stop_node`: end the command and leave; sent to an incarnation that is no longer wanted."""

    node: NodeIdentity
    grace: Duration
    reason: str


# Activities of the worker: what a backend does


class NodeRequest(Message):
    """Argument of `create_node`: all that a backend needs; the same request twice makes one node."""

    node: NodeIdentity
    name: str
    """Deterministic: see `workflows.names.node_name`."""
    spec: JobSpec
    job_id: str
    job_first_run_id: str
    group_id: str
    task_queue: str
    """The node's own."""


class NodeRef(Message):
    """Argument of `delete_node` and part of others: one incarnation of a node."""

    name: str
    uid: str
    role: str
    rank: int
    incarnation: int
    backend: str
    namespace: str
    grace: Duration = timedelta(seconds=30)
    """From SIGTERM to SIGKILL when it is deleted."""


class CreatedNode(Message):
    name: str
    address: str = ""
    host: str = ""
    log_path: str = ""
    pending: str = ""
    """Why it cannot run yet; empty where it can."""


class NodeEventKind(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    GONE = "GONE"
    """Its processes have ended or it was removed; nothing of it runs any more."""


class NodeEvent(Message):
    """A fact from the backend about one incarnation."""

    kind: NodeEventKind
    rank: int
    incarnation: int
    time: datetime
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None


class SiteFacts(Message):
    """What `site_facts` answers: what the worker found out about its Temporal namespace when it started."""

    search_attributes: bool
    """Perdure's search attributes exist; setting one that does not exist would block the workflow for ever."""
    backends: tuple[str, ...] = ()
    """Backends that this worker serves."""


class NodeEvents(Message):
    """Signal `node_events` of NodeGroup, sent by its watch."""

    events: tuple[NodeEvent, ...] = ()
    owner_closed: bool = False
    """The job that owns the group has closed: wind down."""


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


# Users to TrainingJob


class ScaleRequest(Message):
    """Update `scale`."""

    nodes: str
    """`4`, or `2:8` for min and max."""
    role: str | None = None
    """Needed only where the job has several."""


class ReasonRequest(Message):
    """Updates `suspend`, `resume`, `restart`."""

    reason: str = ""


class RelaunchRequest(Message):
    """Update `relaunch_node`."""

    rank: int
    reason: str = ""


class Accepted(Message):
    """The answer to an update."""

    message: str
    """What happens now, in a sentence."""


# What TrainingJob tells


class Evidence(Message):
    """One thing that was seen."""

    time: datetime
    source: EvidenceSource
    rank: int | None = None
    text: str


class Considered(Message):
    """An option that was not taken, and why."""

    option: str
    why_not: str


class IncidentView(Message):
    """One interruption, from its first sign until the world steps again: what `perdure explain` prints."""

    number: int
    title: str
    failure: FailureClass | None = None
    """None for what users asked for."""
    culprit: int | None = None
    """The node (slot) where it began, where that is known."""
    started_at: datetime
    """When it happened."""
    noticed_at: datetime
    """When the job heard of it."""
    decided_at: datetime | None = None
    commanded_at: datetime | None = None
    """When the last surviving agent had the new world."""
    entered_at: datetime | None = None
    """When the last member's rendezvous returned."""
    stepping_at: datetime | None = None
    """When the last member stepped again."""
    evidence: tuple[Evidence, ...] = ()
    rule: str = ""
    """The policy's rule that decided, by name."""
    action: str = ""
    considered: tuple[Considered, ...] = ()
    generation_before: int = 0
    generation_after: int | None = None
    nodes_before: int = 0
    nodes_after: int | None = None
    step_before: int | None = None
    log_tail: str = ""


class JobStatus(Message):
    """Query `status`."""

    name: str
    namespace: str
    uid: str
    phase: JobPhase
    reason: str = ""
    """Why it is in this phase, in a sentence."""
    role: str
    backend: str
    generation: int
    nodes: int
    """Members of the current world."""
    nodes_min: int
    nodes_max: int
    world_size: int
    """Ranks of the current world."""
    restarts: int
    """Within the window."""
    max_restarts: int
    restart_window: Duration
    started_at: datetime
    finished_at: datetime | None = None
    groups: tuple[str, ...] = ()
    """Workflow IDs of the node groups, which know each node's progress."""
    unreachable: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    protected: bool = True
    """False once ranks were found that had not come through our rendezvous."""
    last_incident: IncidentView | None = None
    next_action: str = ""
    progress: Progress | None = None
    """As of the last failure or finish; the groups know the current one."""


class JobResult(Message):
    """What the workflow returns: small and stable, for CI."""

    phase: JobPhase
    exit_code: int
    """0 ok, 1 user code failed, 3 infrastructure, 4 cancelled, 5 deadline."""
    reason: str
    generations: int
    restarts: int
    """Failures that were repaired by a new generation."""
    step: int | None = None
    started_at: datetime
    finished_at: datetime
