"""What one trial gives: written as a line of JSON, so that a cut-off run can continue where it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

BALLAST_MB = 4096
"""The kernel takes a second or two to take so much memory from a process that was killed."""


class Scenario(StrEnum):
    """What is killed, with SIGKILL, in a job whose nodes have one rank each."""

    WORKER = "a"
    """The second node's rank."""
    NODE_REPLACED = "b"
    """All of the second node; a replacement comes. `--nodes 2:2` where there are two."""
    NODE_LOST = "c"
    """All of the second node; no replacement can come. `--nodes 1:2`."""
    RANK_DURING_REPAIR = "d"
    """All of the second node, and while that is repaired the first node's new rank."""
    SLOW_TO_DIE = "e"
    """Both torchruns; the last rank holds so much memory that its own end takes a second or two."""

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
        """For the training script, beside what every trial's has."""
        return {"BENCH_BALLAST_MB": str(BALLAST_MB)} if self is Scenario.SLOW_TO_DIE else {}

    def nodes(self, size: int) -> str:
        """In torchrun's words, for a job of this many nodes."""
        return f"{size - 1}:{size}" if self is Scenario.NODE_LOST else f"{size}:{size}"

    def world_size_after(self, size: int) -> int:
        return size - 1 if self is Scenario.NODE_LOST else size


class SystemName(StrEnum):
    """Who keeps the job running."""

    TORCHRUN = "torchrun"
    TORCHRUN_OWN_STORE = "torchrun, own store"
    """With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: a way around torchrun's worst, for those who know of it."""
    DLROVER = "dlrover"
    PERDURE = "perdure"
    PERDURE_COLD = "perdure, cold starts"
    """With `recovery.warm_starts: false`: every rank imports torch anew."""
    PERDURE_WITHHELD = "perdure, lease only"
    """The backend says nothing: leases and peers must do."""
    FLOOR = "bare processes"
    """No system: the ranks alone, from nothing to their first step."""


OURS = (SystemName.PERDURE, SystemName.PERDURE_COLD, SystemName.PERDURE_WITHHELD)
PEERS = (SystemName.TORCHRUN, SystemName.TORCHRUN_OWN_STORE, SystemName.DLROVER)


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Composition(Record):
    """What the seconds consist of, each counted from the kill."""

    happened: float | None = None
    """The first sign of it on a node, or at the backend."""
    noticed: float | None = None
    """The job learned of it."""
    decided: float | None = None
    commanded: float | None = None
    """The last surviving agent had the new world."""
    entered: float | None = None
    """The last member's rendezvous returned."""
    process_started: float | None = None
    """The last new rank's interpreter reached its script."""
    imported: float | None = None
    """... had imported torch."""
    grouped: float | None = None
    """... had its process group."""
    stepped: float | None = None


class TrialRecord(Record):
    """One kill, and what came of it."""

    system: SystemName
    scenario: Scenario
    number: int = Field(ge=1)
    size: int = 2
    """Nodes of the job, of one rank each."""
    recovered: bool
    seconds: float | None = None
    """From the kill to the first step of all ranks of the new world."""
    start_seconds: float | None = None
    """From nothing to the first step of all ranks."""
    steps_redone: int | None = None
    error: str = ""
    composition: Composition = Composition()


class ResultFile:
    """The trials of one run, a line each."""

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
