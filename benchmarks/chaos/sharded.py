"""Checks what the sharded programs wrote down: each world continues with the newest step that was whole, bit for bit.

A step is whole once all ranks have it with its copies. It is lost where the next world loads an older one; and it had
no copy left if the memory of two nodes was lost since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .faults import Fault, Kind


@dataclass(frozen=True)
class Line:
    """What a rank has kept, or loaded."""

    time: float
    step: int
    """0 where nothing was loaded."""
    rank: int
    world_size: int
    generation: int
    digest: str
    """Of the whole parameters."""


@dataclass(frozen=True)
class Lost:
    """Steps that a world does not continue with, although all ranks of the one before had them."""

    generation: int
    steps: int
    had_copy: bool


@dataclass(frozen=True)
class Course:
    """How a sharded program went."""

    worlds: tuple[int, ...]
    """The sizes of all that loaded something or began."""
    lost: tuple[Lost, ...]
    other_bits: tuple[int, ...]
    """The generations that have loaded a step with other parameters than were saved."""

    @property
    def steps_lost_with_copy(self) -> int:
        """The steps that should have been there."""
        return sum(one.steps for one in self.lost if one.had_copy)


def parse(text: str) -> list[Line]:
    """Parses complete lines; ignores one that is still being written."""
    found: list[Line] = []
    for line in text.splitlines(keepends=True):
        words = line.split()
        if line.endswith("\n") and len(words) == 6:
            time, step, rank, world_size, generation, digest = words
            number = 0 if step == "None" else int(step)
            found.append(Line(float(time), number, int(rank), int(world_size), int(generation), digest))
    return found


def read(out: Path, faults: Iterable[Fault]) -> Course:
    """Judges what a program has written into its folder so far.

    Args:
        out: The folder.
        faults: Those of its job.
    """
    texts = [
        path.read_text(encoding="utf-8") if path.exists() else "" for path in (out / "steps.log", out / "loads.log")
    ]
    kept, loads = map(parse, texts)
    return judge(kept, loads, faults)


def judge(kept: Sequence[Line], loads: Sequence[Line], faults: Iterable[Fault]) -> Course:
    """Finds what was lost from one world to the next, and what was loaded with other bits."""
    lost: list[Lost] = []
    other_bits: list[int] = []
    sizes: list[int] = []
    hit = [fault for fault in faults if fault.kind is Kind.NODE and fault.processes]
    digests = {(line.step, line.generation): line.digest for line in kept}
    generations = sorted({load.generation for load in loads})
    newest, copied_at = 0, 0.0
    for number, generation in enumerate(generations):
        of_world = [load for load in loads if load.generation == generation]
        sizes.append(of_world[0].world_size)
        step, begun = of_world[0].step, min(load.time for load in of_world)
        if step < newest:
            nodes = {node for fault in hit if copied_at < fault.time < begun for node in fault.nodes}
            lost.append(Lost(generation, newest - step, had_copy=len(nodes) < 2))
        newest = step
        if (whole := _whole(kept, generation, size=sizes[-1])) is not None:
            newest, copied_at = whole
        saved = {digests[step, one] for one in generations[:number] if (step, one) in digests}
        if saved and any(load.digest not in saved or load.step != step for load in of_world):
            other_bits.append(generation)
    return Course(tuple(sizes), tuple(lost), tuple(other_bits))


def _whole(kept: Sequence[Line], generation: int, *, size: int) -> tuple[int, float] | None:
    """The newest step that all ranks of a world have, and when they had the first such: from then on there were copies
    of everything. None if there is none."""
    times: dict[int, list[float]] = {}
    for line in kept:
        if line.generation == generation:
            times.setdefault(line.step, []).append(line.time)
    whole = {step: max(found) for step, found in times.items() if len(found) == size}
    return (max(whole), min(whole.values())) if whole else None
