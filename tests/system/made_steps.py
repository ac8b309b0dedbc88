"""The steps that the scripts below `examples/04-checkpoints` write down."""

from __future__ import annotations

from tests.system.site import Job


def steps(job: Job, rank: int) -> list[int]:
    try:
        return [int(line.split()[1]) for line in (job.out / f"steps-{rank}").read_text().splitlines()]
    except FileNotFoundError:
        return []


def sized_steps(job: Job, rank: int) -> list[tuple[int, int]]:
    """Each step with the size of the world that made it."""
    try:
        lines = (job.out / f"steps-{rank}").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(number), int(size)) for _, number, size in map(str.split, lines)]


def repeated(made: list[int]) -> int:
    """Steps that were made more than once."""
    return len(made) - len(set(made))
