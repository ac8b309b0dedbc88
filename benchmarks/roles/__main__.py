"""`make bench-roles`: kills each role's rank and node of jobs of several roles, and measures what that costs.

A kind of job is one module of this package; what a kind has not measured is `not run`.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.recovery.perdure_job import control_plane

from . import reinforcement_learning
from .records import NOT_RUN, Case, Figures
from .reinforcement_learning import FAULT_EVERY, FAULTS, VICTIMS


def table(cases: list[Case]) -> Table:
    """Returns the cases for people."""
    table = Table(title="Parts of jobs of several roles that were killed", title_justify="left")
    for column in ("backend", "kind", "role", "killed", "works again", "other restarts", "lost", "twice"):
        table.add_column(column)
    for case in cases:
        figures = (case.other_restarts, case.lost, case.doubled)
        recovered = case.problem if case.recovered_s is None else f"{case.recovered_s:.1f} s"
        table.add_row(
            case.backend,
            case.kind,
            case.role,
            case.fault,
            recovered,
            *("" if one is None else str(one) for one in figures),
        )
    return table


def main(
    rounds: Annotated[int, typer.Option(help="How often each part is killed.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds of learning under faults; 0 to leave that out.")] = FAULTS
    * FAULT_EVERY,
) -> None:
    """Kills the parts of jobs of several roles."""
    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(f"bench: {line}", markup=False, soft_wrap=True)

    async def run() -> Figures:
        async with control_plane() as plane:
            found = await reinforcement_learning.cases(plane.client, say, rounds=rounds)
            ettr = await reinforcement_learning.effective_time(plane.client, say, seconds=seconds) if seconds else None
        kubernetes = [
            Case(backend="kubernetes", kind=reinforcement_learning.KIND, role=role, fault=fault, problem=NOT_RUN)
            for role, fault in ((role, "node" if whole_node else "rank") for role, whole_node in VICTIMS)
        ]
        return Figures(cases=[*found, *kubernetes], rl_ettr=None if ettr is None else round(ettr, 3))

    figures = asyncio.run(run())
    console.print(table(figures.cases))
    # The last line is one JSON object.
    print(figures.model_dump_json())


if __name__ == "__main__":
    typer.run(main)
