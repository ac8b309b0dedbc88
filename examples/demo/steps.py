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
