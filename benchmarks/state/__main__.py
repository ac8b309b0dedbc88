"""`make bench-state`: a split state continues in worlds of other sizes: from memory, from storage, by PyTorch's DCP.

Each job has one rank on each of its nodes, which are local, and a model that FSDP2 splits over them. One node is killed
and not replaced, so that the job goes on with one node less; later it grows again. The ways take turns in one run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.recovery.perdure_job import control_plane

from .records import TrialRecord, Way
from .report import closing, table
from .trial import Trial

NODES = (3, 4)
MEGABYTES = (64.0, 512.0)
QUICK_MEGABYTES = 12.0


def main(
    nodes: Annotated[list[int] | None, typer.Option(help="Nodes of the jobs.")] = None,
    megabytes: Annotated[list[float] | None, typer.Option(help="Sizes of the state, with the optimizer's.")] = None,
    way: Annotated[list[Way] | None, typer.Option(help="Only these ways.")] = None,
    runs: Annotated[int, typer.Option(help="Trials of each job and way.")] = 3,
    pause: Annotated[float, typer.Option(help="Seconds of each step, in addition to those of the model.")] = 0.4,
    patience: Annotated[float, typer.Option(help="Seconds for each phase of a trial.")] = 240.0,
    quick: Annotated[bool, typer.Option("--quick", help="One small job of three nodes.")] = False,
) -> None:
    """Kills a node of each job and lets the job grow again, by each way in turn."""
    # The table is wider than the 80 columns of a pipe.
    console = Console(highlight=False, soft_wrap=True, width=140)
    sizes = megabytes or ([QUICK_MEGABYTES] if quick else list(MEGABYTES))
    jobs = [(count, size) for count in nodes or (NODES[:1] if quick else NODES) for size in sizes]
    records: list[TrialRecord] = []
    folder = Path(tempfile.mkdtemp(prefix="perdure-state-"))

    async def run() -> None:
        async with control_plane() as plane:
            for number in range(1, (1 if quick else runs) + 1):
                for count, size in jobs:
                    for one in way or Way:
                        own = folder / f"{count}-{size:g}-{one}-{number}"
                        own.mkdir()
                        record = await Trial(plane, own, one, count, size, pause, patience, number=number).run()
                        records.append(record)
                        console.print(f"bench: {record.model_dump_json()}", markup=False)
                        if not record.error:
                            shutil.rmtree(own)

    asyncio.run(run())
    console.print(table(records))
    if any(record.error for record in records):
        console.print(f"files of trials that failed are kept in {folder}")
    else:
        folder.rmdir()
    print(json.dumps(closing(records), separators=(",", ":")))


if __name__ == "__main__":
    typer.run(main)
