"""`make picture`: runs a job under torchrun, DLRover and Perdure with the same faults, and a job in a terminal; writes
the README's pictures and those of the page, and ends with one line of JSON."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.history.__main__ import quieten
from benchmarks.picture.course import SCENARIO, Fault, Plan, Record, run_course, run_peer
from benchmarks.picture.drawing import draw
from benchmarks.picture.page import take_pictures
from benchmarks.picture.terminal import record_terminal
from benchmarks.recovery.dlrover_environment import NotAvailable
from benchmarks.recovery.dlrover_environment import ensure as ensure_dlrover
from benchmarks.recovery.perdure_job import PerdureJob, control_plane
from benchmarks.recovery.processes import pid_namespaces_work

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
FAULTS = (Fault(at=10), Fault(at=35, whole_node=True))
SECONDS = 70.0


async def run_ours(folder: Path, seconds: float) -> Record:
    """Runs the job under Perdure."""
    async with control_plane() as plane:
        plan = Plan(faults=FAULTS, seconds=seconds, folder=folder)
        return await run_course(PerdureJob(SCENARIO, folder, plane), plan)


async def run_peers(folder: Path, seconds: float) -> dict[str, Record]:
    """Runs it under the peers that work here."""
    if not await pid_namespaces_work():
        say("the peers need a PID namespace, which is refused here: the picture is without them")
        return {}
    peers: dict[str, Path | None] = {"torchrun": None}
    try:
        peers = {"DLRover": await ensure_dlrover()} | peers
    except NotAvailable as reason:
        say(f"without DLRover: {reason}")
    records: dict[str, Record] = {}
    for name, binaries in peers.items():
        own = folder / name
        own.mkdir()
        records[name] = await run_peer(Plan(faults=FAULTS, seconds=seconds, folder=own, dlrover=binaries))
        say(f"{name}: {records[name].last_step:,} steps")
    return records


async def make_course(seconds: float) -> dict[str, int]:
    """Draws the steps of all systems; returns how many each has made."""
    with tempfile.TemporaryDirectory(prefix="perdure-picture-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "ours").mkdir()
        ours = await run_ours(folder / "ours", seconds)
        say(f"Perdure: {ours.last_step:,} steps")
        records = {"Perdure": ours} | await run_peers(folder, seconds)
    path = IMAGES / "steps-under-faults.svg"
    path.write_text(draw(records, FAULTS, seconds=seconds), encoding="utf-8")
    say(f"{path.relative_to(IMAGES.parents[1])} is written")
    return {name: record.last_step for name, record in records.items()}


def say(line: str) -> None:
    """Prints a line of progress."""
    print(f"picture: {line}", flush=True)


def main(
    seconds: Annotated[float, typer.Option(help="Seconds for which each system is watched.")] = SECONDS,
    terminal_only: Annotated[bool, typer.Option("--terminal-only", help="Only record the terminal.")] = False,
    page_only: Annotated[bool, typer.Option("--page-only", help="Only take pictures of the page.")] = False,
) -> None:
    """Writes all pictures to docs/images."""
    quieten()
    if not terminal_only:
        asyncio.run(take_pictures(IMAGES))
        say("docs/images/page-*.png are written")
    if page_only:
        return
    steps = {} if terminal_only else asyncio.run(make_course(seconds))
    asyncio.run(record_terminal(IMAGES / "terminal.svg"))
    say("docs/images/terminal.svg is written")
    print(json.dumps({"steps": steps}))


if __name__ == "__main__":
    typer.run(main)
