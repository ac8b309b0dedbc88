"""`make bench-roles`: kills each role's rank and node of jobs of several roles, and measures what that costs.

A kind of job is one module of this package, and so is a backend; what was not measured is `not run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.recovery.perdure_job import control_plane
from scripts.cluster import binaries
from scripts.cluster.cluster import why_not

from . import kubernetes, parameter_servers, reinforcement_learning
from .documented import DLROVER
from .records import NOT_RUN, Case, Figures
from .reinforcement_learning import FAULT_EVERY, FAULTS


class Part(StrEnum):
    """What can be measured by itself."""

    RL = "rl"
    ETTR = "ettr"
    PARAMETER_SERVERS = "parameter-servers"
    KUBERNETES = "kubernetes"


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


def documented() -> Table:
    """Returns what DLRover documents, for people."""
    table = Table(title="DLRover 0.6.1, as documented by its source: not run here", title_justify="left")
    for column in ("part of DLRover", "killed", "what follows", "source"):
        table.add_column(column, overflow="fold")
    for one in DLROVER:
        table.add_row(*one)
    return table


async def measure(say: Callable[[str], None], chosen: set[Part], *, rounds: int, seconds: float) -> Figures:
    """Kills the parts of the chosen jobs; the others are `not run`."""
    found: list[Case] = []
    ettr: float | None = None
    if chosen - {Part.KUBERNETES}:
        async with control_plane() as plane:
            if Part.RL in chosen:
                async with reinforcement_learning.learning(plane.client, "cases") as job:
                    found += await reinforcement_learning.cases(job, say, backend="local", rounds=rounds)
            if Part.ETTR in chosen and seconds:
                ettr = await reinforcement_learning.effective_time(plane.client, say, seconds=seconds)
            if Part.PARAMETER_SERVERS in chosen:
                found += await parameter_servers.cases(plane.client, say, rounds=rounds)
    if Part.KUBERNETES in chosen:
        async with kubernetes.learning_on_pods(say, "cases") as job:
            found += await reinforcement_learning.cases(job, say, backend=kubernetes.BACKEND, rounds=rounds)
    return Figures(
        cases=[*found, *_not_run(found)],
        rl_ettr=None if ettr is None else round(ettr, 3),
        ps_worker_s=parameter_servers.seconds_of(found, parameter_servers.WORKER),
        ps_server_s=parameter_servers.seconds_of(found, parameter_servers.SERVER),
    )


def _not_run(found: list[Case]) -> list[Case]:
    expected = [
        (backend, kind, role, whole_node)
        for backend, kind, victims in (
            ("local", reinforcement_learning.KIND, reinforcement_learning.VICTIMS),
            ("local", parameter_servers.KIND, parameter_servers.VICTIMS),
            (kubernetes.BACKEND, reinforcement_learning.KIND, reinforcement_learning.VICTIMS),
        )
        for role, whole_node in victims
    ]
    run = {(case.backend, case.kind) for case in found}
    return [
        Case(backend=backend, kind=kind, role=role, fault="node" if whole_node else "rank", problem=NOT_RUN)
        for backend, kind, role, whole_node in expected
        if (backend, kind) not in run
    ]


def main(
    rounds: Annotated[int, typer.Option(help="How often each part is killed.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds of learning under faults.")] = FAULTS * FAULT_EVERY,
    only: Annotated[list[Part] | None, typer.Option(help="What is measured; by default all. May be repeated.")] = None,
) -> None:
    """Kills the parts of jobs of several roles."""
    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(f"bench: {line}", markup=False, soft_wrap=True)

    chosen = set(only or Part)
    if Part.KUBERNETES in chosen and (problem := why_not()):
        say(f"no cluster: {problem}")
        chosen.remove(Part.KUBERNETES)
    if Part.KUBERNETES in chosen:
        # A build has an event loop of its own.
        binaries.ensure(say)
    figures = asyncio.run(measure(say, chosen, rounds=rounds, seconds=seconds))
    console.print(table(figures.cases))
    console.print(documented())
    # The last line is one JSON object.
    print(figures.model_dump_json())


if __name__ == "__main__":
    typer.run(main)
