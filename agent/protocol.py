"""The bodies of requests on `agent.sock`, as docs/node-protocol.md has them.

The other side is the standard library only and may be of another release: unknown fields are ignored.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from workflows.messages import DeviceUsage, RankExit

SOCKET_NAME = "agent.sock"
LONGEST_WAIT = 60.0
"""Seconds that a long poll may ask for."""


def _from_epoch(value: Any) -> datetime | None:
    """None for what is no time: no report is worth losing for that."""
    if isinstance(value, datetime):
        return value if value.tzinfo else None
    if not isinstance(value, int | float):
        return None
    try:
        return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _from_epoch_or_now(value: Any) -> datetime:
    return _from_epoch(value) or datetime.now(UTC)


EpochTime = Annotated[datetime, BeforeValidator(_from_epoch_or_now)]
"""Seconds since the epoch; anything else counts as the time of arrival."""


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class LauncherHello(Body):
    pid: int
    started_at: EpochTime
    attempt: int = 0
    """The newest attempt that it has started."""
    mode: str = "torchrun"
    script: bool = False
    """The command may do other work before it starts torchrun."""
    processes: int | None = None
    protocol: int = 1


class HandlerHello(Body):
    pid: int
    torch: str = ""
    min_nodes: int
    max_nodes: int
    processes: int = Field(ge=1)
    run_id: str = ""
    store_ports: tuple[int, ...] = ()


class RankExitBody(RankExit):
    time: Annotated[datetime | None, BeforeValidator(_from_epoch)] = None


class ReadyBody(Body):
    after_generation: int = 0
    ranks: tuple[RankExitBody, ...] = ()
    store_ports: tuple[int, ...] = ()
    processes: int = Field(default=1, ge=1)
    out_of_memory: bool = False
    stage: int = 0
    """How many torchruns of the command have ended with 0 before this one."""


class EnteredBody(Body):
    generation: int
    time: EpochTime
    store_ports: tuple[int, ...] | None = None


class FinishedBody(Body):
    generation: int
    time: EpochTime


class SupersededBody(Body):
    """torchrun waits in the exit barrier of a generation that is over: the command must be started again."""

    generation: int


class ExitedBody(Body):
    attempt: int
    generation: int = 0
    exit_code: int | None = None
    signal: int | None = None
    ranks: tuple[RankExitBody, ...] = ()
    log_tail: str = ""
    out_of_memory: bool = False
    time: EpochTime
    superseded: bool = False
    message: str = ""


class LeavingBody(Body):
    """A party other than the job ends the node, and the launcher ends the command for it."""

    reason: str = ""


class UsageBody(Body):
    cpu_cores: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    devices: tuple[DeviceUsage, ...] = ()


class UnprotectedBody(Body):
    ranks: tuple[int, ...] = ()
    """Process IDs."""
    detail: str = ""


class LeaveBody(Body):
    """The parent of the node's processes ends them."""

    reason: str = ""


class WorldBody(Body):
    """A world as this node enters it; generation 0 stands for none."""

    generation: int = 0
    nodes: int = 0
    group_rank: int = 0
    base_rank: int = 0
    world_size: int = 0
    store_address: str = ""
    store_port: int = 0
    store_host: bool = False
    stage: int | None = None
    """The torchrun of the command that it is for, from 0; None where an older worker did not say."""
    complete: int = 0
    stages_complete: int = 0
    """How many torchruns of the command the job has finished."""


class DesiredBody(Body):
    """What the launcher must make true."""

    version: int
    run: bool
    attempt: int
    stop_generation: int
    world: WorldBody | None
    exit: bool
    exit_grace_s: float
    """From SIGTERM to SIGKILL when it leaves."""
    reason: str
