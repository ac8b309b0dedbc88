"""What agents say: signals to the NodeGroup of their node, and failures and ends to the TrainingJob itself.

Telemetry goes to the group, whose history it fills; what a job must decide on goes to the job without a detour.
"""

from __future__ import annotations

from pydantic import Field

from perdure.spec.durations import Duration
from workflows.messages.base import ErrorText, LogTail, Message, ShortText, Time, Vocabulary
from workflows.messages.logs import LogPosition
from workflows.messages.vocabulary import ProgressSource


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
    time: Time
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
    last_step_at: Time | None = None
    apart: bool = False
    """Ranks step without a process group although there are several: each trains by itself."""


class Joined(AgentMessage):
    """An agent's first report, repeated whenever it restarts. To the NodeGroup."""

    agent_started_at: Time
    address: ShortText
    """Where other nodes reach this one: a pod's IP, or 127.0.0.1."""
    host: ShortText = ""
    """The machine's name, for people."""
    generation: int = 0
    """The newest generation that this node has received; 0 for none. Agents refuse lower ones."""
    agent_version: str = ""
    log_path: ShortText = ""
    """Where the node keeps its log, where its backend cannot know that."""
    preparing: bool = False
    """Its command has worked for a while and has not come to its torchrun yet. Said again while that lasts."""


class Ready(AgentMessage):
    """The node's command waits for a world. To the NodeGroup."""

    after_generation: int = 0
    """The newest generation that it has already been in."""
    store_ports: tuple[int, ...] = ()
    """Ports on which this node already listens, each for the store of one generation."""
    processes: int = Field(default=1, ge=1)
    """Ranks that this node will start."""
    command_nodes: ShortText | None = None
    """`--nnodes` as the command itself was given it, where that differs from what we asked for."""
    stage: int | None = None
    """How many torchruns of the command have ended with 0 before the one that asks; None from an agent of an older
    release, which cannot pass over torchruns that the job has finished."""


class RankStarts(Message):
    """How ranks were started for a generation."""

    warm: int = 0
    """Ranks whose process had imported torch before they were started."""
    cold: int = 0
    reason: ShortText = ""
    """Why the first of the cold ones was not warm."""
    standbys: int = 0
    """Those of the warm ones that had waited as a process of their own; the others were forked."""
    standby_reason: ShortText = ""
    """Why the first of these was not forked."""

    def __add__(self, other: RankStarts) -> RankStarts:
        return RankStarts(
            warm=self.warm + other.warm,
            cold=self.cold + other.cold,
            reason=self.reason or other.reason,
            standbys=self.standbys + other.standbys,
            standby_reason=self.standby_reason or other.standby_reason,
        )


class Stepping(AgentMessage):
    """All ranks of the node made their first step in a generation, or have stayed alive in it without one. To the
    NodeGroup; a first step that comes later is reported again."""

    generation: int
    counted: bool = True
    """A step of every rank was seen."""
    entered_at: Time | None = None
    """When the node's handler returned the world: what follows is process start."""
    starts: RankStarts | None = None
    """Of the node's ranks; None where warm starts are turned off, or cannot be had at all."""


class Stall(AgentMessage):
    """No rank of the node steps any more although its processes are alive, or they step again. To the NodeGroup."""

    generation: int
    since: Time | None = None
    """Of the last step; None where the ranks step again."""
    usual_step: Duration | None = None
    """How long a step took before that."""


class LeaseTaken(AgentMessage):
    """The agent holds the lease of this epoch: it is back. To the NodeGroup."""

    agent_started_at: Time
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


class LeaseView(Message):
    """An agent's latest report, in the heartbeat details of its lease: costs no history."""

    epoch: int
    generation: int = 0
    state: str = ""
    progress: Progress | None = None
    log_end: LogPosition | None = None
    """Where the node's log ends now: who follows it asks for more only where there is more."""
    time: Time | None = None


class RankExit(Message):
    """One rank that ended badly."""

    local_rank: int
    global_rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    """None where a signal ended it."""
    signal: int | None = None
    error: ErrorText | None = None
    """From the rank's torch error file: the exception's type and message, on one line."""
    traceback: LogTail | None = None
    """Its last lines; at most 2,000 characters."""
    time: Time | None = None


class FailureKind(Vocabulary):
    RANKS = "RANKS"
    """Ranks ended; torchrun is alive and asks for the next world."""
    COMMAND = "COMMAND"
    """The command itself ended."""
    UNPROTECTED = "UNPROTECTED"
    """Ranks without a rendezvous; the agent has stopped them."""
    RENDEZVOUS = "RENDEZVOUS"
    """Nothing ended: the command runs and has not entered the world in time."""
    NODE = "NODE"
    """The node is ended from outside, and its processes have ended for that."""
    UNKNOWN = "UNKNOWN"
    """Of a newer agent: the other fields say what it is about."""


class Failure(AgentMessage):
    """Something ended on a node, or did not begin. To the TrainingJob, at once, never dropped."""

    generation: int
    """The one that it happened in; 0 before the first."""
    kind: FailureKind
    ranks: tuple[RankExit, ...] = ()
    exit_code: int | None = None
    """Of the command."""
    signal: int | None = None
    """That ended the command."""
    starts_again: bool = False
    """Of COMMAND: the agent has it started again by itself, for a newer world that the node was given meanwhile."""
    message: ShortText = ""
    """One line for people."""
    log_tail: LogTail = ""
    """The last lines of the command's output; at most 4,000 characters."""
    progress: Progress | None = None
    store_ports: tuple[int, ...] = ()
    out_of_memory: bool = False
    """The node's memory controller counted an OOM kill."""


class GroupMissing(AgentMessage):
    """The server knows no open NodeGroup of this node's, although its job runs. To the TrainingJob."""


class Finished(AgentMessage):
    """All ranks of this node ended with 0 in this generation, or its command did. To the TrainingJob."""

    generation: int
    """The newest that the node entered; 0 where its command ended without one."""
    progress: Progress | None = None
    command_runs: bool = False
    """Only torchrun has finished: the command itself has not ended, and its end is reported by another message. Agents
    of older releases know no difference."""
