"""Jobs that train `train.py` on one GPU, and the lines that its ranks write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("train.py")


@dataclass(frozen=True)
class Line:
    """A step that a rank has made or restored."""

    kind: str
    step: int
    digest: str
    generation: int
    pid: int
    started: float
    """When the script began."""
    time: float


def lines(out: Path, rank: int) -> list[Line]:
    """The lines of a rank, of all generations."""
    try:
        text = (out / f"steps-{rank}").read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text.splitlines()]
    return [Line(r[0], int(r[1]), r[2], int(r[3]), int(r[4]), float(r[5]), float(r[6])) for r in rows if len(r) == 7]


async def train(site: Site, *, ranks: int, backend: str, steps: int, **spec: Any) -> Job:
    """Starts a job of one node."""
    out = site.folder / "trained"
    command = ["torchrun", f"--nproc-per-node={ranks}", str(SCRIPT), str(out), "--backend", backend]
    job = await site.submit(nodes="1", command=[*command, "--steps", str(steps)], **spec)
    job.out = out
    return job


async def at_step(job: Job, step: int, *, rank: int = 0, generation: int = 1) -> Line:
    """Waits until a rank has made a step in a generation, or a later one; returns its newest line."""

    def newest() -> Line | None:
        made = [line for line in lines(job.out, rank) if line.generation >= generation and line.kind == "made"]
        return made[-1] if made and made[-1].step >= step else None

    return await eventually(newest, within=PATIENCE, what=lambda: f"step {step}; the last: {lines(job.out, rank)[-2:]}")
