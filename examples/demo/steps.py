"""The training's own record of its steps, from which the demo decides whether steps continued."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Step:
    """One line of `steps.csv`."""

    time: float
    number: int
    loss: float
    world_size: int


def read_steps(folder: Path) -> list[Step]:
    """Reads all complete lines so far."""
    try:
        lines = (folder / "steps.csv").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = (line.split(",") for line in lines)
    return [Step(float(row[0]), int(row[1]), float(row[2]), int(row[3])) for row in rows if len(row) == 4]


@dataclass(frozen=True)
class Samples:
    """What the model was trained on: of a step that was made more than once, the last attempt counts."""

    of_steps: dict[int, tuple[int, ...]]
    """The samples of each step, over all ranks."""

    def repeated(self, first: int, last: int) -> int:
        """Counts the samples of these steps that the model had been trained on before."""
        seen = {sample for step, samples in self.of_steps.items() if step < first for sample in samples}
        count = 0
        for step in range(first, last + 1):
            for sample in self.of_steps.get(step, ()):
                count += sample in seen
                seen.add(sample)
        return count

    @property
    def distinct(self) -> set[int]:
        return {sample for samples in self.of_steps.values() for sample in samples}


def read_samples(folder: Path) -> Samples:
    """Reads what the ranks wrote down of the samples that they read, as far as lines are complete."""
    found: dict[int, tuple[int, list[int]]] = {}
    for path in sorted(folder.glob("samples-*.csv")):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue
            generation, step, numbers = line.split(",")
            known = found.setdefault(int(step), (int(generation), []))
            if int(generation) > known[0]:
                known = found[int(step)] = (int(generation), [])
            if int(generation) == known[0]:
                known[1].extend(map(int, numbers.split()))
    return Samples({step: tuple(samples) for step, (_, samples) in found.items()})


def longest_gap(steps: list[Step], start: float, end: float) -> float:
    """Returns the longest pause between two steps of an interval, in seconds."""
    times = [start, *(step.time for step in steps if start <= step.time <= end), end]
    return max(later - earlier for earlier, later in pairwise(times))


def steps_again(steps: list[Step], start: float, end: float) -> int:
    """Counts the steps of an interval that had been made before."""
    made, again = {step.number for step in steps if step.time <= start}, 0
    for step in steps:
        if start < step.time <= end:
            again += step.number in made
            made.add(step.number)
    return again


def made_between(steps: list[Step], start: float, end: float) -> tuple[int, int]:
    """Returns the lowest and the highest step of an interval; (1, 0) if there is none."""
    numbers = [step.number for step in steps if start < step.time <= end]
    return (min(numbers), max(numbers)) if numbers else (1, 0)


async def stepping(folder: Path, *, since: float, world_size: int, count: int = 5, within: float = 120.0) -> float:
    """Waits for `count` steps of a world of this size after `since`; returns the time of the first one.

    Raises:
        TimeoutError: if there are fewer steps in time.
    """
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        made = [step for step in read_steps(folder) if step.time > since and step.world_size == world_size]
        if len(made) >= count:
            return made[0].time
        await asyncio.sleep(0.1)
    made = [step for step in read_steps(folder) if step.time > since]
    seen = f"the last of {len(made)} steps was of a world of {made[-1].world_size}" if made else "there was no step"
    raise TimeoutError(f"waited {within:.0f} s for {count} steps of a world of {world_size}; {seen}")
