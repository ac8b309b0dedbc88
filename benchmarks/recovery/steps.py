"""Determines when the world stepped again from the ranks' own log, in the same way for every system."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

STEPS_THAT_COUNT = 5
"""Number of steps of a recovered world: one that steps once and dies has not recovered."""


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
    """One line of `starts.log`: the phases of a rank's start, in seconds since the epoch."""

    pid: int
    rank: int
    started: float
    imported: float
    grouped: float


@dataclass(frozen=True)
class WorldStart:
    """A world of which all ranks stepped and continued."""

    time: float
    """The time at which the last rank made its first step."""
    pids: dict[int, int]
    """PIDs by rank."""
    first_step: int
    """The lowest number of a rank's first step."""


def parse_steps(text: str) -> list[Step]:
    """Parses complete lines; ignores a line that is still being written."""
    found: list[Step] = []
    for line in text.splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and len(words) == 5:
            time, *numbers = words
            found.append(Step(float(time), *map(int, numbers)))
    return found


def parse_starts(text: str) -> list[ProcessStart]:
    """Parses complete lines of `starts.log`."""
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
    """Returns the first world of this size without processes in `without` whose ranks all made `count` steps."""
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


def passed_at(steps: Iterable[Step], world: WorldStart, *, step: int) -> float | None:
    """Returns the time at which all ranks of a world had made a step above this one; None if one has not."""
    times: dict[int, float] = {}
    for made in steps:
        if made.step > step and world.pids.get(made.rank) == made.pid:
            times.setdefault(made.rank, made.time)
    return max(times.values()) if times.keys() == world.pids.keys() else None


@dataclass
class StepLog:
    """Reads `steps.log` while it grows."""

    folder: Path
    steps: list[Step] = field(default_factory=list[Step])
    _offset: int = 0

    def refresh(self) -> list[Step]:
        """Returns all steps so far."""
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
        """Returns all processes that have created a process group so far."""
        path = self.folder / "starts.log"
        return parse_starts(path.read_text(encoding="utf-8")) if path.exists() else []
