"""What the benchmark writes down: as JSON, so that a cut-off run can continue where it was."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class FaultName(StrEnum):
    """What is done to a job of two nodes, each on a kubelet of its own."""

    POD_DELETED = "pod deleted"
    CONTAINER_KILLED = "training container killed"
    OUT_OF_MEMORY = "memory beyond the limit"
    KUBELET_STOPPED = "kubelet stopped"
    MACHINE_DRAINED = "machine drained"
    WORKER_KILLED = "worker killed"
    API_SERVER_RESTARTED = "API server restarted in a relaunch"

    @property
    def interrupts(self) -> bool:
        """Whether training must stop for it; the loss of what only watches over training must not stop it."""
        return self not in (FaultName.KUBELET_STOPPED, FaultName.WORKER_KILLED)


class FaultTrial(Record):
    """One fault, and what came of it. Seconds count from the fault."""

    fault: FaultName
    number: int = Field(ge=1)
    ok: bool
    """All ranks step again; where nothing had to stop, nothing did."""
    noticed: float | None = None
    """Until the job learned of it; None where there is nothing that it should do."""
    decided: float | None = None
    stepping: float | None = None
    """Until all ranks of the new world stepped; where nothing had to stop, the longest pause between two steps."""
    title: str = ""
    """What the job took it for."""
    action: str = ""
    """What it did."""
    error: str = ""


class Posted(Record):
    """So many pods, from the word until they run. Seconds."""

    nodes: int
    requested: float
    """Until the API server has them all."""
    running: float
    """Until all are running, at the pace of scheduler and (played) kubelets."""


class Relaunched(Record):
    """Nodes that were lost at once. Seconds from their loss."""

    nodes: int
    of: int
    requested: float
    """Until the API server has all replacements."""
    whole: float
    """Until the job runs with all its nodes again."""


class Held(Record):
    """Leases that were held for a while, each by a worker of its own."""

    leases: int
    seconds: float
    lost: int
    """Leases that lapsed, and were given again within the same run of their group."""
    late: int
    """Leases whose heartbeat came too late, so that the server offered them anew, and their holder took them again."""
    heartbeats: int
    """Signals that were sent."""
    heartbeats_lost: int
    unreachable: int
    """Nodes that the job calls unreachable at the end."""
    worker_cpu_percent: float
    """Of one core."""
    worker_rss_mb: float
    server_cpu_percent: float
    server_rss_mb: float


class Thousand(Record):
    """One large job on nodes that KWOK plays."""

    bare: Posted
    """A loop that makes the same pods with the same parallelism, and nothing else."""
    job: Posted
    relaunched: Relaunched | None = None
    held: Held | None = None

    @property
    def ratio(self) -> float:
        """How much longer the job takes until all its pods run."""
        return self.job.running / self.bare.running


RecordT = TypeVar("RecordT", bound=Record)


class ResultFile:
    """Records of one kind, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, kind: type[RecordT]) -> list[RecordT]:
        if not self._path.exists():
            return []
        return [kind.model_validate_json(line) for line in self._path.read_text(encoding="utf-8").splitlines()]

    def append(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
