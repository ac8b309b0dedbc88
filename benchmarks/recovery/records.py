"""The result of one trial: written as a line of JSON, so that an interrupted run can be resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

BALLAST_MB = 4096
"""Memory of a rank in MB: the kernel needs a second or two to free it when the process is killed."""


class Scenario(StrEnum):
    """The processes that are killed, with SIGKILL, in a job with one rank per node."""

    WORKER = "a"
    """The second node's rank."""
    NODE_REPLACED = "b"
    """All processes of the second node, which is replaced. `--nodes 2:2` for two nodes."""
    NODE_LOST = "c"
    """All processes of the second node, which cannot be replaced. `--nodes 1:2`."""
    RANK_DURING_REPAIR = "d"
    """All processes of the second node and, during the repair, the first node's new rank."""
    SLOW_TO_DIE = "e"
    """Both torchruns; the last rank has so much memory that its own end takes a second or two."""

    @property
    def title(self) -> str:
        return {
            Scenario.WORKER: "(a) one worker process",
            Scenario.NODE_REPLACED: "(b) a node, replaced",
            Scenario.NODE_LOST: "(c) a node, not replaced",
            Scenario.RANK_DURING_REPAIR: "(d) a node, then a rank of another",
            Scenario.SLOW_TO_DIE: "(e) torchrun, ranks slow to die",
        }[self]

    @property
    def environment(self) -> dict[str, str]:
        """Additional environment variables of the training script."""
        return {"BENCH_BALLAST_MB": str(BALLAST_MB)} if self is Scenario.SLOW_TO_DIE else {}

    def nodes(self, size: int) -> str:
        """Returns torchrun's `--nnodes` for a job of this many nodes."""
        return f"{size - 1}:{size}" if self is Scenario.NODE_LOST else f"{size}:{size}"

    def world_size_after(self, size: int) -> int:
        return size - 1 if self is Scenario.NODE_LOST else size


class SystemName(StrEnum):
    """The system that keeps the job running."""

    TORCHRUN = "torchrun"
    TORCHRUN_OWN_STORE = "torchrun, own store"
    """torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: a workaround for its worst case, for users who know it."""
    DLROVER = "dlrover"
    PERDURE = "perdure"
    PERDURE_COLD = "perdure, cold starts"
    """Perdure with `recovery.warm_starts: false`: every rank imports torch."""
    PERDURE_WITHHELD = "perdure, lease only"
    """Perdure without evidence from the backend: leases and peers only."""
    FLOOR = "bare processes"
    """No system: the ranks alone, from start to first step."""


OURS = (SystemName.PERDURE, SystemName.PERDURE_COLD, SystemName.PERDURE_WITHHELD)
PEERS = (SystemName.TORCHRUN, SystemName.TORCHRUN_OWN_STORE, SystemName.DLROVER)


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Composition(Record):
    """The phases of a recovery, each in seconds since the kill."""

    happened: float | None = None
    """The first evidence of it on a node, or at the backend."""
    noticed: float | None = None
    """The job received the evidence."""
    decided: float | None = None
    commanded: float | None = None
    """The last surviving agent received the new world."""
    entered: float | None = None
    """The last member's rendezvous returned."""
    process_started: float | None = None
    """The interpreter of the last new rank reached its script."""
    imported: float | None = None
    """The last new rank had imported torch."""
    grouped: float | None = None
    """The last new rank had created its process group."""
    stepped: float | None = None


class TrialRecord(Record):
    """One kill and its consequences."""

    system: SystemName
    scenario: Scenario
    number: int = Field(ge=1)
    size: int = 2
    """The number of nodes of the job, with one rank each."""
    recovered: bool
    seconds: float | None = None
    """From the kill to the first step of all ranks of the new world."""
    start_seconds: float | None = None
    """From the job's start to the first step of all ranks."""
    steps_redone: int | None = None
    """Steps of the killed world that the new one made again."""
    caught_up_seconds: float | None = None
    """From the kill until all ranks have made a step that the killed world had not made."""
    error: str = ""
    composition: Composition = Composition()


class ResultFile:
    """A file with the trials of one run, one per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[TrialRecord]:
        if not self.path.exists():
            return []
        return [TrialRecord.model_validate_json(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def append(self, record: TrialRecord) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")


def count_trials(records: Iterable[TrialRecord]) -> Counter[tuple[SystemName, Scenario]]:
    return Counter((record.system, record.scenario) for record in records)
