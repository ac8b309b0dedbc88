"""When did the world step again? The ranks' own log answers, the same way for every system."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

STEPS_THAT_COUNT = 5
"""A world that steps once and dies has not recovered; one that continues this far has."""


@dataclass(frozen=True)
class Step:
    """One line of `steps.log`."""

    time: float
    step: int
    rank: int
    world_size: int
    pid: int


@dataclass(frozen=True)
class ProcessStart:
    """One line of `starts.log`: a rank's way to its first step. Seconds since the epoch."""

    pid: int
    rank: int
    started: float
    imported: float
    grouped: float


@dataclass(frozen=True)
class WorldStart:
    """All ranks of one world stepped, and continued."""

    time: float
    """When the last of them made its first step."""
    pids: dict[int, int]
    """By rank."""
    first_step: int
    """The lowest step that one of them began with."""


def parse_steps(text: str) -> list[Step]:
    """Reads whole lines; a line that is still being written is left out."""
    found: list[Step] = []
    for line in text.splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and len(words) == 5:
            time, *numbers = words
            found.append(Step(float(time), *map(int, numbers)))
    return found


def parse_starts(text: str) -> list[ProcessStart]:
    """Reads whole lines of `starts.log`."""
    found: list[ProcessStart] = []
    for line in text.splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and len(words) == 5:
            found.append(ProcessStart(int(words[0]), int(words[1]), *map(float, words[2:])))
    return found


def find_world(
    steps: Iterable[Step],
    *,
    world_size: int,
    after: float,
    without: Collection[int] = (),
    count: int = STEPS_THAT_COUNT,
) -> WorldStart | None:
    """The first world of this size, made of processes not in `without`, whose every rank made `count` steps."""
    made: dict[tuple[int, int], list[Step]] = {}
    complete: dict[int, list[Step]] = {}
    for step in steps:
        if step.time <= after or step.world_size != world_size or step.pid in without:
            continue
        of_process = made.setdefault((step.rank, step.pid), [])
        of_process.append(step)
        if len(of_process) >= count:
            complete.setdefault(step.rank, of_process)
    if len(complete) < world_size:
        return None
    firsts = [of_process[0] for of_process in complete.values()]
    return WorldStart(
        time=max(first.time for first in firsts),
        pids={first.rank: first.pid for first in firsts},
        first_step=min(first.step for first in firsts),
    )


@dataclass
class StepLog:
    """Follows `steps.log` while it grows."""

    folder: Path
    steps: list[Step] = field(default_factory=list[Step])
    _offset: int = 0

    def refresh(self) -> list[Step]:
        """All steps so far."""
        path = self.folder / "steps.log"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.steps.extend(parse_steps(whole.decode()))
        return self.steps

    def starts(self) -> list[ProcessStart]:
        """All processes that have reached a process group so far."""
        path = self.folder / "starts.log"
        return parse_starts(path.read_text(encoding="utf-8")) if path.exists() else []
