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


def _from_epoch(value: Any) -> Any:
    return datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else value


EpochTime = Annotated[datetime, BeforeValidator(_from_epoch)]
"""Seconds since the epoch."""


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class LauncherHello(Body):
    pid: int
    started_at: EpochTime
    attempt: int = 0
    """The newest attempt that it has started."""
    mode: str = "torchrun"
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
    time: EpochTime | None = None


class ReadyBody(Body):
    after_generation: int = 0
    ranks: tuple[RankExitBody, ...] = ()
    store_ports: tuple[int, ...] = ()
    processes: int = Field(default=1, ge=1)
    out_of_memory: bool = False


class EnteredBody(Body):
    generation: int
    time: EpochTime
    store_ports: tuple[int, ...] | None = None


class FinishedBody(Body):
    generation: int
    time: EpochTime


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
    """Somebody other than the job ends the node, and the launcher ends the command for it."""

    reason: str


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
    """Whoever started the node's processes ends them."""

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
    complete: int = 0


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
