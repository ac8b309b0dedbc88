"""Draws the picture of docs/scaling.md from the record of a real job: `python -m benchmarks.scaling.picture OUT.svg`.

The job's law is known, its size is not: with each node its steps share less to compute, and exchange more.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.recovery.perdure_job import control_plane
from perdure.cli import text
from perdure.client.client import Client
from perdure.contract import JobStatus
from perdure.page.report import plot

from .real_jobs import Law, specification

LAW = Law(compute=0.3, exchange=0.048)
MIN_EFFICIENCY = 0.3
"""The second node makes the job 1.41 times as fast, the third one no faster."""
_MANY = 10_000


async def draw(path: Path, *, steps: int) -> list[str]:
    """Runs the job and draws it; returns what it did, in the words of `perdure explain`.

    Args:
        path: The file that is written, as a picture of its suffix.
        steps: The job is drawn once it has made so many with the number of nodes that it keeps.
    """
    name = f"sized-{secrets.token_hex(2)}"
    async with control_plane() as plane:
        with tempfile.TemporaryDirectory(prefix="ps-", ignore_cleanup_errors=True) as folder:
            job = specification(name, LAW, Path(folder), steps=_MANY, noise=0.05, min_efficiency=MIN_EFFICIENCY)
            await plane.client.submit(job)
            status = await _kept(plane.client, name, steps)
            await plot(plane.client, name, ("worlds", "throughput"), path)
            incidents = await plane.client.incidents(name)
            await plane.client.cancel(name)
            await plane.client.wait(name)
    told = [text.incident_line(one) for one in sorted(incidents, key=lambda one: one.number)]
    return [*told, "" if status.scaling is None else status.scaling.why]


async def _kept(client: Client, name: str, steps: int) -> JobStatus:
    """The status of the job once it has made so many steps with the number of nodes that it keeps."""
    begun: dict[int, int] = {}
    async with aclosing(client.watch(name)) as snapshots:
        async for snapshot in snapshots:
            status = snapshot.status
            if status is None or status.scaling is None or status.progress is None:
                continue
            if status.scaling.resized and status.scaling.chosen == status.nodes:
                first = begun.setdefault(status.generation, status.progress.step)
                if status.progress.step >= first + steps:
                    return status
    raise RuntimeError(f"{name} ended before")


def main(
    path: Annotated[Path, typer.Argument(help="The SVG that is written.")],
    steps: Annotated[int, typer.Option(help="Steps with the number of nodes that the job keeps.")] = 150,
) -> None:
    """Runs a job that chooses its number of nodes, and draws what it did."""
    console = Console(highlight=False, width=150)
    for line in asyncio.run(draw(path, steps=steps)):
        console.print(line, markup=False)


if __name__ == "__main__":
    typer.run(main)
