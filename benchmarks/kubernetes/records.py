"""The benchmark's results: written as JSON, so that an interrupted run can be resumed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class FaultName(StrEnum):
    """A fault of a job with two nodes, each on a kubelet of its own."""

    POD_DELETED = "pod deleted"
    POD_DELETED_GATEWAY = "pod deleted, agents through a gateway"
    CONTAINER_KILLED = "training container killed"
    OUT_OF_MEMORY = "memory beyond the limit"
    KUBELET_STOPPED = "kubelet stopped"
    MACHINE_DRAINED = "machine drained"
    WORKER_KILLED = "worker killed"
    API_SERVER_RESTARTED = "API server restarted in a relaunch"

    @property
    def interrupts(self) -> bool:
        """Whether the fault interrupts training; the loss of a component that only watches training must not."""
        return self not in (FaultName.KUBELET_STOPPED, FaultName.WORKER_KILLED)

    @property
    def through_gateway(self) -> bool:
        """Whether the agents connect to a gateway; the others connect to Temporal."""
        return self is FaultName.POD_DELETED_GATEWAY


class FaultTrial(Record):
    """One fault and its consequences. Seconds count from the fault."""

    fault: FaultName
    number: int = Field(ge=1)
    ok: bool
    """Whether all ranks step again or, if the fault need not interrupt training, never stopped."""
    noticed: float | None = None
    """Until the job detected it; None if it need not react."""
    decided: float | None = None
    stepping: float | None = None
    """Until all ranks of the new world stepped; without an interruption, the longest pause between two steps."""
    title: str = ""
    """The title of the job's incident."""
    action: str = ""
    """The job's action."""
    error: str = ""


class Posted(Record):
    """The times until a number of pods run, in seconds."""

    nodes: int
    requested: float
    """Until the API server has all pods."""
    running: float
    """Until all pods run, at the rate of scheduler and (simulated) kubelets."""


class Relaunched(Record):
    """The recovery of nodes that were lost at once. Seconds from their loss."""

    nodes: int
    of: int
    requested: float
    """Until the API server has all replacements."""
    whole: float
    """Until the job runs with all its nodes again."""


class Held(Record):
    """Leases that were held for some time, each by a worker of its own."""

    leases: int
    seconds: float
    lost: int
    """Leases that lapsed and were granted again within the same run of their group."""
    late: int
    """Leases whose heartbeat came too late, so that the server rescheduled them, and their holder took them again."""
    unreachable: int
    """Nodes that are unreachable at the end."""
    worker_cpu_percent: float
    """Percent of one core."""
    worker_rss_mb: float
    server_cpu_percent: float
    server_rss_mb: float


class Thousand(Record):
    """The measurements of one large job on nodes that KWOK simulates."""

    bare: Posted
    """A loop that only creates the same pods, with the same parallelism."""
    job: Posted
    relaunched: Relaunched | None = None
    held: Held | None = None

    @property
    def ratio(self) -> float:
        """The job's time until all its pods run, relative to the bare loop's."""
        return self.job.running / self.bare.running


RecordT = TypeVar("RecordT", bound=Record)


class ResultFile:
    """A file with records of one kind, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, kind: type[RecordT]) -> list[RecordT]:
        if not self._path.exists():
            return []
        return [kind.model_validate_json(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def append(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
