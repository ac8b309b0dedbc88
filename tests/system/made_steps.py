"""The steps that the scripts below `examples/04-checkpoints` write down."""

from __future__ import annotations

from tests.system.site import Job


def steps(job: Job, rank: int) -> list[int]:
    try:
        return [int(line.split()[1]) for line in (job.out / f"steps-{rank}").read_text().splitlines()]
    except FileNotFoundError:
        return []


def repeated(made: list[int]) -> int:
    """Steps that were made more than once."""
    return len(made) - len(set(made))
