"""The JSON bodies on `agent.sock`, for both of its sides: the launcher's processes and the agent.

The two may be of different releases, so bodies only grow: unknown fields are ignored, and one that is missing or
malformed has its default. A body without a field that has no default is refused. Times are seconds since the epoch; the
agent takes None for the time of arrival. docs/node-protocol.md says what follows from each body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final

PROTOCOL: Final = 1
"""Grows when the two sides could not understand each other any more. Fields that are added leave it as it is."""


def protocol_mismatch(*, launcher: int, agent: int) -> str:
    """Why these two cannot work together, and what to do; empty where they can."""
    if launcher == agent:
        return ""
    return (
        f"the launcher speaks protocol {launcher} and the agent speaks protocol {agent}: they come from releases of "
        "Perdure that cannot work together. Replace the node (`perdure restart JOB --node NODE`): its launcher and its "
        "agent then come from one release, that of the worker which creates it"
    )


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a request or an answer holds."""


@dataclass(frozen=True, kw_only=True)
class RankExit(Body):
    """One rank that ended badly."""

    local_rank: int
    global_rank: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    """None where a signal ended it."""
    signal: int | None = None
    error: str | None = None
    """From its torch error file: the exception's type and message, on one line."""
    traceback: str | None = None
    time: float | None = None


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
    stage: int | None = None
    """The torchrun of the command that it is for, from 0; None where an older worker did not say."""


@dataclass(frozen=True, kw_only=True)
class LauncherHello(Body):
    """The launcher's first report, and its first to each agent that is started again."""

    pid: int
    started_at: float | None = None
    attempt: int = 0
    """The newest attempt that it has started."""
    mode: str = "torchrun"
    """`torchrun` or `env`."""
    script: bool = False
    """The command may do other work before it starts torchrun."""
    processes: int | None = None
    """Ranks of this node."""
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class HandlerHello(Body):
    """The same of the rendezvous handler in a torchrun."""

    pid: int
    torch: str = ""
    min_nodes: int
    max_nodes: int
    processes: int
    run_id: str = ""
    store_ports: tuple[int, ...] = ()
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class HelloAnswer(Body):
    """The agent's answer to both."""

    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class ReadyReport(Body):
    """The node waits for a world that is newer than `after_generation`."""

    after_generation: int = 0
    ranks: tuple[RankExit, ...] = ()
    """What ended that generation on this node."""
    store_ports: tuple[int, ...] = ()
    processes: int = 1
    out_of_memory: bool = False
    stage: int = 0
    """How many torchruns of the command have ended with 0 before this one."""


@dataclass(frozen=True, kw_only=True)
class EnteredReport(Body):
    """The node's processes enter this generation."""

    generation: int
    time: float | None = None
    store_ports: tuple[int, ...] | None = None
    """On which the node listens now; None: as before."""


@dataclass(frozen=True, kw_only=True)
class FinishedReport(Body):
    """All local ranks ended with 0 in this generation."""

    generation: int
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class SupersededReport(Body):
    """torchrun waits in the exit barrier of a generation that is over: the command must be started again."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class CommandExit(Body):
    """The command ended, or could not be started."""

    attempt: int
    generation: int = 0
    exit_code: int | None = None
    """None where a signal ended it."""
    signal: int | None = None
    ranks: tuple[RankExit, ...] = ()
    """Exits that torchrun has seen and could not report any more."""
    log_tail: str = ""
    out_of_memory: bool = False
    time: float | None = None
    superseded: bool = False
    """It left the exit barrier of a generation that is over."""
    message: str = ""
    """What the launcher recognizes in its end."""


@dataclass(frozen=True, kw_only=True)
class LeavingReport(Body):
    """A party other than the job ends the node, and the launcher ends the command for it."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceUsage(Body):
    """The usage of one GPU; None for values that the driver does not report."""

    index: int
    name: str = ""
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None


@dataclass(frozen=True, kw_only=True)
class UsageReport(Body):
    """What the training processes use."""

    cpu_cores: float | None = None
    """CPU-seconds per second."""
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    devices: tuple[DeviceUsage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnmanagedReport(Body):
    """Ranks train outside the job's world."""

    ranks: tuple[int, ...] = ()
    """Process IDs."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class LeaveRequest(Body):
    """The parent of the node's processes ends them."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Desired(Body):
    """The agent's answer about what the launcher must make true."""

    version: int
    run: bool
    attempt: int
    stop_generation: int = 0
    """Ranks of this generation and older ones must not run."""
    world: World | None = None
    exit: bool = False
    exit_grace_s: float | None = None
    """From SIGTERM to SIGKILL when it leaves; None is the configured one."""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class WorldAnswer(Body):
    """The agent's answer about the newest world: the world's own fields, and what the job has finished."""

    generation: int = 0
    """0 where there is no world."""
    nodes: int = 0
    group_rank: int = 0
    base_rank: int = 0
    world_size: int = 0
    store_address: str = ""
    store_port: int = 0
    store_host: bool = False
    stage: int | None = None
    complete: int = 0
    """The newest generation that every rank of the job finished."""
    stages_complete: int = 0
    """How many torchruns of the command the job has finished."""

    @classmethod
    def of(cls, world: World | None, *, complete: int, stages_complete: int) -> WorldAnswer:
        known = {} if world is None else {field.name: getattr(world, field.name) for field in fields(World)}
        return cls(**known, complete=complete, stages_complete=stages_complete)

    @property
    def world(self) -> World | None:
        if not self.generation:
            return None
        return World(**{field.name: getattr(self, field.name) for field in fields(World)})


POSTS: Final[Mapping[str, type[Body]]] = MappingProxyType(
    {
        "/v1/launcher/hello": LauncherHello,
        "/v1/launcher/ready": ReadyReport,
        "/v1/launcher/entered": EnteredReport,
        "/v1/launcher/finished": FinishedReport,
        "/v1/launcher/exited": CommandExit,
        "/v1/launcher/leaving": LeavingReport,
        "/v1/launcher/usage": UsageReport,
        "/v1/launcher/unprotected": UnmanagedReport,
        "/v1/leave": LeaveRequest,
        "/v1/rendezvous/hello": HandlerHello,
        "/v1/rendezvous/ready": ReadyReport,
        "/v1/rendezvous/entered": EnteredReport,
        "/v1/rendezvous/finished": FinishedReport,
        "/v1/rendezvous/superseded": SupersededReport,
    }
)
"""What is posted where."""

GETS: Final[Mapping[str, type[Body]]] = MappingProxyType(
    {"/v1/launcher/desired": Desired, "/v1/rendezvous/world": WorldAnswer}
)
"""What long polls answer."""
