"""Messages of agents to the group of their node, and to the job, each with its route.

Telemetry goes to the group, so that it fills the group's history and not the job's. An agent sends what a job must
decide on directly to the job.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, Field

from perdure.contract.base import (
    LONGEST_ERROR,
    ErrorText,
    LogTail,
    Message,
    Number,
    ShortText,
    Time,
    Vocabulary,
    shorten,
    size_in_json,
)
from perdure.contract.checks import Checks
from perdure.contract.courses import Course
from perdure.contract.logs import LogPosition
from perdure.contract.nodes import LARGEST_PORT, Ports, WorldRequest
from perdure.contract.peaks import Peaks
from perdure.contract.routes import Destination, Route, RoutedMessage
from perdure.contract.vocabulary import ProgressSource
from perdure.spec.base import MOST_RULES
from perdure.spec.durations import Duration
from perdure_training.node_api.bodies import RankExit

REFUSAL_LASTS = timedelta(seconds=90)
"""How long the report of a refused agent counts, where it does not say so."""

__all__ = [
    "AgentMessage",
    "Checked",
    "CopyReceiver",
    "DeviceUsage",
    "Failure",
    "FailureKind",
    "Finished",
    "GroupMissing",
    "Joined",
    "LeaseTaken",
    "LeaseView",
    "Leaving",
    "PaceReport",
    "PollsRefused",
    "PortsChanged",
    "PrintedLines",
    "Progress",
    "RankExit",
    "RankStarts",
    "RankStepTimes",
    "RareLine",
    "Ready",
    "ResourceUse",
    "RuleMatch",
    "SnapshotUse",
    "Stall",
    "StepTimesReport",
    "Stepping",
    "WorldStart",
]

LARGEST_NUMBER = 2**53
"""Generations, stages and steps that an agent accepts from its node's processes."""
UNKNOWN_RANK = -1
"""The local rank of an exit whose node does not have the rank that was named."""
LONGEST_TRACEBACK = 2_000
"""Characters of a rank's traceback, which keeps its end."""
_SIZE_OF_EXITS = 512 * 1024
"""Bytes of all errors and tracebacks of one message, in JSON, but for the beginnings of further ones."""
_LONGEST_FURTHER_ERROR = 200
MOST_EXITS = 256
MOST_DEVICES = 64
MOST_STEPS = 64
MOST_STEP_TIMES = 64
MOST_COMPUTES = 16
MOST_KEYS = 200
MOST_RARE_LINES = 12
"""Items of one list. A job carries them in its state, which the server limits; further ones are left out."""


CHANGED_PACE = 0.15
"""Changes of a usual step, as a share of it, that agents tell, and from which on a job forgets what it has measured
with other numbers of nodes."""

LONGEST_RARE_LINE = 300
"""Characters of one line of output that is compared with those of other nodes."""


Texts = Annotated[tuple[ShortText, ...], AfterValidator(lambda texts: texts[:MOST_STEPS])]
Steps = Annotated[tuple[int, ...], AfterValidator(lambda steps: steps[:MOST_STEPS])]


def _bounded_exits(exits: tuple[RankExit, ...]) -> tuple[RankExit, ...]:
    """The exits with texts of bounded lengths. Those of the first ones are the longest, together of a bounded size: a
    message that the server does not take would leave the failure unknown."""
    bounded, room = list[RankExit](), _SIZE_OF_EXITS
    for exit in exits[:MOST_EXITS]:
        error = exit.error and shorten(exit.error, LONGEST_ERROR)
        traceback = exit.traceback and exit.traceback[-LONGEST_TRACEBACK:]
        size = size_in_json(f"{error}{traceback}")
        if size > room:
            error, traceback = error and shorten(error, _LONGEST_FURTHER_ERROR), None
            size = size_in_json(error or "")
        room -= size
        bounded.append(replace(exit, error=error, traceback=traceback))
    return tuple(bounded)


class AgentMessage(RoutedMessage, route=None):
    """Base of all signals of agents. Its fields let a receiver recognize repeated, reordered and stale messages."""

    sequence: int = Field(ge=1)
    """Counts the messages to one destination; a restarted agent continues the count."""
    time: Time
    """When the reported event happened."""
    reported_at: Time | None = None
    """When the agent learned of it, where it happened earlier: a rank that failed may take seconds to end."""

    @property
    def subject(self) -> str:
        """What it is about: where only the newest message counts, it replaces those about the same."""
        return ""


class Progress(Message):
    """Training progress of one node: that of its slowest rank."""

    step: int = 0
    total_steps: int | None = None
    """Steps that the script plans to make; None where it does not report them."""
    steps_per_second: float | None = None
    """Over the last minute or since the generation began, whichever is shorter."""
    loss: float | None = None
    diverged: bool = False
    """The reported loss is not a finite number, which no message can carry."""
    mfu: float | None = None
    """The model FLOPs utilization that the script reported last, as a share."""
    source: ProgressSource = ProgressSource.COUNTED
    generation: int = 0
    """The generation whose ranks made the step; 0 where an older agent does not say it."""
    generation_steps: int = 0
    """Steps seen in that generation."""
    last_step_at: Time | None = None
    apart: bool = False
    """Several ranks step without a process group: each trains a model of its own."""
    course: Course = ()
    """The same over time, as lists of seconds since 1970, step, steps per second and loss; only of the node that has
    the first rank."""
    peaks: Peaks | None = None
    """The most that the node has used of its machine, over all of its agents."""


class CopyReceiver(Message):
    """Where an agent takes copies of what the scripts of other nodes have saved."""

    port: Annotated[int, Field(ge=0, le=LARGEST_PORT)]
    folder: ShortText
    """The name of its folder, which is new where the copies of the one before are lost."""
    rack: ShortText = ""
    """The node's rack, or whatever part of the site fails at once; empty where that is unknown."""


class Joined(AgentMessage, route=Route(Destination.GROUP, "joined")):
    """An agent's first report, repeated whenever it restarts."""

    agent_started_at: Time
    address: ShortText
    """The address under which other nodes reach this one: a pod's IP, or 127.0.0.1."""
    host: ShortText = ""
    """The machine's name, for people."""
    generation: int = 0
    """The newest generation that this node has received; 0 for none. Agents refuse lower ones."""
    log_path: ShortText = ""
    """The node's log file, if its backend cannot know the path."""
    preparing: bool = False
    """Its command has run for a while and has not started torchrun yet. The agent repeats this report while that
    lasts."""
    waits: ShortText = ""
    """What its command waits for before it starts."""
    copies: CopyReceiver | None = None
    """Set where the job's nodes keep copies for each other, and this one can."""
    unpacks_roles: bool = False
    """It can read `packed_roles`."""


class Leaving(AgentMessage, route=Route(Destination.GROUP, "leaving", newest_only=True)):
    """The node is being ended by another party than the job, and waits for a checkpoint before its ranks end."""

    generation: int
    reason: ShortText = ""


class Ready(WorldRequest, AgentMessage, route=Route(Destination.GROUP, "ready", newest_only=True)):
    """The node's command waits for a world."""

    after_generation: int = 0
    """The newest generation that the node has entered before."""
    stage: int = 0
    """The number of the command's torchruns that exited with 0 before the one that waits."""


class RankStarts(Message):
    """Counts of warm and cold starts of ranks in one generation."""

    warm: int = 0
    """Ranks whose process had imported torch before they were started."""
    cold: int = 0
    reason: ShortText = ""
    """Why the first cold start was not warm."""
    standbys: int = 0
    """Warm starts that used a waiting standby process; the other warm ranks were forked."""
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


class SnapshotUse(Message):
    """How the ranks of a node keep their state in memory."""

    replicated: bool = False
    """Every rank has the whole state."""
    copies: int = 0
    """The nodes that keep a copy of each snapshot."""


class WorldStart(Message):
    """How the ranks of a node began in a world."""

    counted: bool = True
    """A step of every rank was seen."""
    entered_at: Time | None = None
    """When the node's rendezvous handler returned the world. The time after that is process start."""
    starts: RankStarts | None = None
    """Starts of the node's ranks; None where warm starts are turned off or not supported."""
    saves: bool | None = None
    """Whether a rank of the node had begun to save into the job's storage before its first step; None where the job has
    no storage, no step was seen yet, or the agent does not know."""
    snapshots: SnapshotUse | None = None
    """How the ranks of the node keep their state in memory, as far as a `Checkpointer` has said it before their first
    step; None where none has."""


class Stepping(WorldStart, AgentMessage, route=Route(Destination.GROUP, "stepping", newest_only=True, spread=True)):
    """All ranks of the node made their first step in a generation, or have stayed alive in it without one. A
    first step that comes later is reported again."""

    generation: int


class Stall(AgentMessage, route=Route(Destination.GROUP, "stall", newest_only=True)):
    """A stall of the node, or its end: no rank steps although the processes are alive, or they step again."""

    generation: int
    since: Time | None = None
    """The time of the last step, or when the node entered its world; None where the ranks step again."""
    usual_step: Duration | None = None
    """The usual time of a step before the stall."""
    at_start: bool = False
    """No rank has made a step in this world, within the time that the job gave it."""


class LeaseTaken(AgentMessage, route=Route(Destination.GROUP, "lease_taken", newest_only=True, spread=True)):
    """The agent has taken the lease of this epoch, so it is reachable again."""

    agent_started_at: Time
    epoch: int


class PollsRefused(AgentMessage, route=Route(Destination.GROUP, "polls_refused", newest_only=True, journaled=False)):
    """The Temporal server refuses to hand the agent commands and leases, for lack of capacity; repeated while it does.
    So its silence says nothing about its node."""

    cause: ShortText
    """The server's text."""
    lasts: Duration = REFUSAL_LASTS
    """How long that counts, unless the agent reports it again: agents of large jobs do so at longer intervals."""


class PortsChanged(AgentMessage, route=Route(Destination.GROUP, "ports_changed", newest_only=True, journaled=False)):
    """A world has taken a port, so the ports that the node offers for the store of the next one have changed."""

    store_ports: Ports = ()


class Checked(AgentMessage, route=Route(Destination.GROUP, "checked", newest_only=True)):
    """The node has checked its machine before it is taken into a world."""

    run: int = Field(ge=1)
    """Counts the runs; a second one decides where the first has failed."""
    checks: Checks = ()


class DeviceUsage(Message):
    """Use of one accelerator."""

    index: int
    name: ShortText = ""
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    slowed: ShortText = ""
    """Why its clocks are reduced: `thermal`, `hardware` or `power`; empty where they are not, or that is not known."""


class ResourceUse(Message):
    """Resource use of a node's training processes."""

    cpu_cores: float | None = None
    """CPU-seconds per second."""
    cpu_wait_cores: float | None = None
    """Seconds per second for which threads could run and waited for a processor, which others or a limit kept."""
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    devices: Annotated[tuple[DeviceUsage, ...], AfterValidator(lambda devices: devices[:MOST_DEVICES])] = ()


class RankStepTimes(Message):
    """How the usual step of a rank splits, in seconds, over the last seconds."""

    rank: int
    """The global rank."""
    compute: Number
    """The time from the end of a step, or of a collective right after it, to the first collective of the next."""
    wait: Number
    """The time from there to the optimizer's step: the rank waits for others, or computes while collectives run."""
    rest: Number
    """The optimizer's step, and what follows it."""
    computes: Annotated[tuple[Number, ...], AfterValidator(lambda times: times[:MOST_COMPUTES])] = ()
    """`compute` in each measurement of this world, where the job has requested them: see `World.measurements`."""
    slowed: ShortText = ""
    """Why the clocks of its GPU are reduced, as in `DeviceUsage`."""


StepTimesOfRanks = Annotated[tuple[RankStepTimes, ...], AfterValidator(lambda ranks: ranks[:MOST_STEP_TIMES])]


class StepTimesReport(
    AgentMessage, route=Route(Destination.GROUP, "step_times", newest_only=True, journaled=False, spread=True)
):
    """How the steps of the node's ranks split: sent once in a world, and again where that has changed."""

    generation: int
    ranks: StepTimesOfRanks


class PaceReport(AgentMessage, route=Route(Destination.GROUP, "pace", newest_only=True, journaled=False)):
    """How fast a world steps, of the node with its first rank: sent where `World.pace_over` asks for it, once the world
    has settled, and again where that has changed."""

    generation: int
    step: Number = Field(gt=0)
    """Seconds of a usual step; pauses between steps, such as evaluations, do not count."""
    spread: Number = Field(default=0, ge=0)
    """Half the distance between the quartiles of its measurements, in seconds."""
    progress: Progress | None = None


class LeaseView(Message):
    """An agent's latest report, in the heartbeat details of its lease, which add nothing to the history."""

    epoch: int
    generation: int = 0
    state: str = ""
    progress: Progress | None = None
    idle: Duration | None = None
    """The time since a rank of the node made a step, by the agent's clock; None where its ranks need not step."""
    usual_step: Duration | None = None
    """The usual time of a step in this generation."""
    step_times: StepTimesOfRanks = ()
    """How steps split, of the ranks that can tell it."""
    unsplit_steps: bool = False
    """A rank has stepped for a while, and cannot tell how its steps split."""
    metrics: ResourceUse | None = None
    """None before the launcher's first report."""
    peaks: Peaks | None = None
    """The most that the node has used of its machine, over all of its agents."""
    log_end: LogPosition | None = None
    """The current end of the node's log. A reader that follows the log requests more only after this has moved."""
    time: Time | None = None


class FailureKind(Vocabulary):
    """Kinds of failures that an agent reports."""

    RANKS = "RANKS"
    """Ranks ended; torchrun is alive and requests the next world."""
    COMMAND = "COMMAND"
    """The command itself ended."""
    UNPROTECTED = "UNPROTECTED"
    """Ranks started without Perdure's rendezvous; the agent has stopped them."""
    RENDEZVOUS = "RENDEZVOUS"
    """Nothing ended: the command runs and has not entered the world in time."""
    NODE = "NODE"
    """Something outside ends the node, and its processes have ended because of that."""
    UNKNOWN = "UNKNOWN"
    """A kind that only a newer release knows; the other fields describe the failure."""


class RuleMatch(Message):
    """A rule of `retry.rules` whose `match.log` fits what a node that failed has printed."""

    rule: int
    """The number of the rule, from 0."""
    line: ShortText = ""
    """The newest line that fits."""
    too_slow: bool = False
    """Whether the pattern fits is not known: the search took too long, and was given up."""


class RareLine(Message):
    """A line that a node has printed shortly before it failed, and not regularly."""

    text: Annotated[str, AfterValidator(lambda text: text[:LONGEST_RARE_LINE])]
    key: int


class PrintedLines(Message):
    """What a node has printed, for a comparison with other nodes: lines that differ in numbers only have one key."""

    generation: int = 0
    """The generation in which it has."""
    keys: Annotated[tuple[int, ...], AfterValidator(lambda keys: keys[:MOST_KEYS])] = ()
    """The keys of all its lines, the newest first."""
    rare: Annotated[tuple[RareLine, ...], AfterValidator(lambda lines: lines[:MOST_RARE_LINES])] = ()
    """Its rare lines, the newest first, without tracebacks."""


class Failure(AgentMessage, route=Route(Destination.JOB, "failure", first=True, urgent=True)):
    """A failure on a node: something ended or did not start. It is sent at once, and dropped for no other kind."""

    generation: int
    """The generation in which it happened; 0 before the first."""
    kind: FailureKind
    ranks: Annotated[tuple[RankExit, ...], AfterValidator(_bounded_exits)] = ()
    """The exits, as the launcher reported them; `UNKNOWN_RANK` stands for one that the node does not have."""
    exit_code: int | None = None
    """The command's exit code."""
    signal: int | None = None
    """The signal that ended the command."""
    starts_again: bool = False
    """Set with COMMAND only: the agent itself starts the command again, for a newer world that the node was given in
    the meantime."""
    message: ShortText = ""
    """One line for people."""
    error: ErrorText | None = None
    """The exception with which the command's output ends, where no rank names its own."""
    log_tail: LogTail = ""
    """The last lines of the command's output; at most 4,000 characters."""
    matches: Annotated[tuple[RuleMatch, ...], AfterValidator(lambda matches: matches[:MOST_RULES])] = ()
    """The rules of the job whose `match.log` fits its output."""
    printed: PrintedLines | None = None
    """What the node has printed; None in jobs of one node."""
    progress: Progress | None = None
    store_ports: Ports = ()
    out_of_memory: bool = False
    """The node's memory controller counted an OOM kill."""
    memory_limit: int | None = None
    """The limit of that memory controller, in bytes, if it has one."""
    wrong_claims: int = 0
    """Ranks that the agent was told of and that the node does not have: they are unknown here, or left out."""


class GroupMissing(AgentMessage, route=Route(Destination.JOB, "group_missing", newest_only=True, journaled=False)):
    """The server knows no open NodeGroup for this node, although its job runs."""


class Finished(AgentMessage, route=Route(Destination.JOB, "finished", urgent=True)):
    """All ranks of this node ended with 0 in this generation, or its command did."""

    generation: int
    """The newest generation that the node entered; 0 where its command ended without one."""
    progress: Progress | None = None
    command_runs: bool = False
    """Only torchrun has finished: the command still runs, and another message reports its end. Agents of older releases
    do not set it."""
