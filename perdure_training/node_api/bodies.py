"""The JSON bodies on `agent.sock`, for both of its sides: the launcher's processes and the agent.

The two may be of different releases, so bodies only grow: unknown fields are ignored, and one that is missing or
malformed has its default. A body without a field that has no default is refused. Times are seconds since the epoch; the
agent uses the time of arrival for None. docs/node-protocol.md describes the effect of each body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

PROTOCOL: Final = 1
"""Increases when the two sides become incompatible; additional fields do not change it."""


def protocol_mismatch(*, launcher: int, agent: int) -> str:
    """Returns why the two cannot work together, and a remedy; empty if they can."""
    if launcher == agent:
        return ""
    return (
        f"the launcher speaks protocol {launcher} and the agent speaks protocol {agent}: they come from releases of "
        "Perdure that cannot work together. Replace the node (`perdure restart JOB --node NODE`): its launcher and its "
        "agent then come from one release, that of the worker which creates it"
    )


@dataclass(frozen=True, kw_only=True)
class Body:
    """The content of a request or an answer."""


@dataclass(frozen=True, kw_only=True)
class RankExit(Body):
    """The exit of a rank that failed, as it reaches the agent and, in the agent's report, the job."""

    local_rank: int
    global_rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    """None if a signal ended it."""
    signal: int | None = None
    error: str | None = None
    """The exception's type and message, on one line, from the rank's torch error file."""
    traceback: str | None = None
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class UnsoundSteps(Body):
    """Saved states that may not be sound: those that generations up to `generation` saved after the step `after`."""

    generation: int
    after: int
    found_at: int = -1
    """The step whose loss was not a number; below 0 where the job went back for another reason."""
    earlier: tuple[UnsoundSteps, ...] = ()
    """Those from which the job went back before, the latest first; they have none themselves."""

    def has(self, *, generation: int, step: int) -> bool:
        """Whether a state that a generation saved at this step is one of them."""
        return any(generation <= one.generation and step > one.after for one in (self, *self.earlier))


@dataclass(frozen=True, kw_only=True)
class KnownStored(Body):
    """A checkpoint that the job knows to be in its storage."""

    folder: str
    """Its path within the storage."""
    loads: bool = True
    """A world would load it: it is sound, and the job has not failed after its restore."""


@dataclass(frozen=True, kw_only=True)
class KnownStates(Body):
    """The saved states of which the job knew when it formed a world."""

    stored: tuple[KnownStored, ...] = ()
    """The newest checkpoint in the storage, of each place."""
    on_loss: str = "wait"
    """`wait`, `older` or `stop`: what follows where a newer state existed than ranks can load."""
    accepts_less: bool = False
    """A user has decided to continue without what is not there."""
    may_return: bool = False
    """What the memory of the nodes lacks may come back with a node that is being replaced."""


@dataclass(frozen=True, kw_only=True)
class World(Body):
    """One generation, as one node enters it."""

    generation: int
    nodes: int
    group_rank: int
    base_rank: int
    world_size: int
    store_address: str
    store_port: int
    store_host: bool
    stage: int = 0
    """The index of the command's torchrun that it is for, from 0."""
    unsound: UnsoundSteps | None = None
    """The saved states that its ranks do not load; None for none."""
    script_failures: tuple[int, ...] | None = None
    """The newest generations that the script's own failures have ended; None where that is not known."""
    known: KnownStates | None = None
    """The saved states of which the job knows; None where that is not known."""
    keeps_processes: bool = False
    """Processes that run continue in it."""


@dataclass(frozen=True, kw_only=True)
class LauncherHello(Body):
    """The launcher's first report, which it repeats to each restarted agent."""

    pid: int
    attempt: int = 0
    """The newest attempt that the launcher has started."""
    mode: str = "torchrun"
    """`torchrun` or `env`."""
    script: bool = False
    """Whether the command may do other work before it starts torchrun."""
    processes: int | None = None
    """Ranks of this node."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class HandlerHello(Body):
    """The first report of the rendezvous handler in a torchrun, which it repeats to each restarted agent."""

    pid: int
    torch: str = ""
    min_nodes: int
    max_nodes: int
    processes: int
    store_ports: tuple[int, ...] = ()
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class HelloAnswer(Body):
    """The agent's answer to both first reports."""

    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class ReadyReport(Body):
    """The node waits for a world that is newer than `after_generation`."""

    after_generation: int = 0
    ranks: tuple[RankExit, ...] = ()
    """The exits that ended that generation on this node."""
    store_ports: tuple[int, ...] = ()
    processes: int = 1
    out_of_memory: bool = False
    memory_limit: int | None = None
    """The limit of the memory controller that has killed a process, in bytes."""
    stage: int = 0
    """The number of torchruns of the command that have ended with 0 before this one."""


@dataclass(frozen=True, kw_only=True)
class EnteredReport(Body):
    """The node's processes enter this generation."""

    generation: int
    time: float | None = None
    store_ports: tuple[int, ...] | None = None
    """The ports on which the node listens now; None if they are unchanged."""


@dataclass(frozen=True, kw_only=True)
class FinishedReport(Body):
    """All local ranks ended with 0 in this generation."""

    generation: int
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class SupersededReport(Body):
    """torchrun waits in the exit barrier of a generation that is over, so the command must be restarted."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class CommandExit(Body):
    """The command ended, or could not be started."""

    attempt: int
    generation: int = 0
    exit_code: int | None = None
    """None if a signal ended it."""
    signal: int | None = None
    ranks: tuple[RankExit, ...] = ()
    """Exits that torchrun detected but could not report."""
    log_tail: str = ""
    out_of_memory: bool = False
    memory_limit: int | None = None
    """As in `ReadyReport`."""
    time: float | None = None
    superseded: bool = False
    """Whether torchrun left the exit barrier of a generation that is over."""
    message: str = ""
    """The cause, if the launcher recognizes it in the command's output."""


@dataclass(frozen=True, kw_only=True)
class LeavingReport(Body):
    """The node is ended by another party than the job, and the launcher ends the command."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RestoringReport(Body):
    """The command waits until its watched folder is restored, or does not wait any longer."""

    since: float | None = None
    """When it began to wait; None once the folder is restored."""
    problem: str = ""
    """Why the folder could not be restored yet, if that is known."""


@dataclass(frozen=True, kw_only=True)
class DeviceUsage(Body):
    """The usage of one GPU; None for values that the driver does not report."""

    index: int
    name: str = ""
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    slowed: str = ""
    """Why its clocks are reduced: `thermal`, `hardware` or `power`; empty where they are not, or that is not known."""


@dataclass(frozen=True, kw_only=True)
class UsageReport(Body):
    """The resource usage of the training processes."""

    cpu_cores: float | None = None
    """CPU-seconds per second."""
    cpu_wait_cores: float | None = None
    """Seconds per second for which threads could run and waited for a processor, which others or a limit kept."""
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    devices: tuple[DeviceUsage, ...] = ()
    working_set_bytes: int | None = None
    """What the node's container is charged, without file caches that can be reclaimed; None where it has no limit."""
    shm_bytes: int | None = None
    """What is used of /dev/shm; None where that is the machine's."""


@dataclass(frozen=True, kw_only=True)
class RankCollective(Body):
    """The collective in which a rank is in one process group: the oldest that has not ended, or else the newest."""

    group: str
    sequence: int
    """Its number in the group, which is the same on all ranks."""
    name: str
    """What it is, such as `gloo:all_reduce`."""
    sizes: str = ""
    """The shapes of the rank's tensors, such as `8x4`."""
    elements: int = 0
    """The number of elements of these tensors."""
    ended: bool = True


@dataclass(frozen=True, kw_only=True)
class RankCollectives(Body):
    """A rank's answer over its own socket."""

    groups: tuple[RankCollective, ...] = ()
    """One for each process group, the group of its newest call first."""


@dataclass(frozen=True, kw_only=True)
class RankStacks(Body):
    """Where one rank is."""

    global_rank: int
    pid: int
    generation: int = 0
    state: str = ""
    """The kernel's letter for the state of its main thread: R runs, S sleeps, D sleeps and takes no signal, T is
    stopped, t has a debugger attached."""
    cpu_percent: float | None = None
    """Its use of processors while it was asked; 100 for one whole processor."""
    cpu_seconds: float | None = None
    """Processor time that it and its living descendants have used since they began."""
    switches: int | None = None
    """How often its main thread had given a processor up before it was asked: one that waits for a lock never does."""
    transferred_bytes: int | None = None
    """What it and its living descendants have read from files and written to them."""
    text: str = ""
    """The stacks of its threads as Python's faulthandler writes them, the main thread's first."""
    collectives: tuple[RankCollective, ...] = ()
    """Where it is in each of its process groups, as torch's flight recorder tells it; empty where it does not."""
    problem: str = ""
    """Why there are no stacks."""


@dataclass(frozen=True, kw_only=True)
class StacksReport(Body):
    """Where the node's ranks are."""

    request: int
    """The number in `Desired.stacks` that it answers."""
    ranks: tuple[RankStacks, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckRequest(Body):
    """The request to measure the node's machine: see `perdure_launcher.probes.checks`."""

    number: int = 0
    """Counts the requests: a new number asks for one `ChecksReport`."""
    kind: str = "quick"
    """`quick`; `full`, with its devices; `link`, the bandwidth to another node."""
    address: str = ""
    """The address at which the node of rank 0 listens, for `link`."""
    port: int = 0
    """The port there."""
    rank: int = 0
    """0 for the node that listens, 1 for the other."""


@dataclass(frozen=True, kw_only=True)
class CheckFigure(Body):
    """What one check has measured."""

    name: str
    subject: str = ""
    """What was checked, where there are several: a folder, a device."""
    value: float | None = None
    unit: str = ""
    seconds: float = 0.0
    """How long the check took."""
    problem: str = ""
    """Why there is no value."""


@dataclass(frozen=True, kw_only=True)
class ChecksReport(Body):
    """What the checks have measured."""

    request: int
    """The number in `Desired.checks` that it answers."""
    figures: tuple[CheckFigure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnmanagedReport(Body):
    """Ranks train outside of the job's world."""

    ranks: tuple[int, ...] = ()
    """Process IDs."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class LeaveRequest(Body):
    """A request to end the node, from the parent of its processes."""

    reason: str = ""
    save: bool = False
    """Whether the job may have a checkpoint made before."""


@dataclass(frozen=True, kw_only=True)
class Desired(Body):
    """The agent's answer with the desired state of the launcher."""

    version: int
    run: bool
    attempt: int
    stop_generation: int = 0
    """Ranks of this generation and older ones must not run."""
    world: World | None = None
    exit: bool = False
    exit_grace_s: float | None = None
    """Seconds from SIGTERM to SIGKILL when the launcher leaves; None for the configured time."""
    reason: str = ""
    stacks: int = 0
    """Counts the requests for the stacks of the ranks: a new number asks for one `StacksReport`."""
    stacks_by_signal: bool = True
    """False: the newest request is for what the kernel says of the ranks alone, and signals none of them."""
    checks: CheckRequest | None = None
    """The newest request to measure the machine."""


@dataclass(frozen=True, kw_only=True)
class WorldAnswer(Body):
    """The agent's answer with the newest world, and the generations and stages that the job has finished."""

    world: World | None = None
    complete: int = 0
    """The newest generation that every rank of the job finished."""
    stages_complete: int = 0
    """The number of torchruns of the command that the job has finished."""


POSTS: Final[Mapping[str, type[Body]]] = MappingProxyType(
    {
        "/v1/launcher/hello": LauncherHello,
        "/v1/launcher/ready": ReadyReport,
        "/v1/launcher/entered": EnteredReport,
        "/v1/launcher/finished": FinishedReport,
        "/v1/launcher/exited": CommandExit,
        "/v1/launcher/leaving": LeavingReport,
        "/v1/launcher/restoring": RestoringReport,
        "/v1/launcher/usage": UsageReport,
        "/v1/launcher/unmanaged": UnmanagedReport,
        "/v1/launcher/stacks": StacksReport,
        "/v1/launcher/checks": ChecksReport,
        "/v1/leave": LeaveRequest,
        "/v1/rendezvous/hello": HandlerHello,
        "/v1/rendezvous/ready": ReadyReport,
        "/v1/rendezvous/entered": EnteredReport,
        "/v1/rendezvous/finished": FinishedReport,
        "/v1/rendezvous/superseded": SupersededReport,
    }
)
"""The bodies of POST requests, by path."""

GETS: Final[Mapping[str, type[Body]]] = MappingProxyType(
    {"/v1/launcher/desired": Desired, "/v1/rendezvous/world": WorldAnswer}
)
"""The answers to long polls, by path."""
