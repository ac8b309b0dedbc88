"""`make bench-ray`: ranks and machines of a Ray cluster killed, under Perdure and under Ray Train, and many actors."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from benchmarks.recovery.perdure_job import control_plane
from tests.system.ray_cluster import RayCluster

from . import environment, many
from .trials import SIZE, Fault, PerdureJob, RayTrainJob, SystemName, Trial, measure, quiet

Say = Callable[[str], None]


class Figures(BaseModel):
    """The last line of the benchmark. A figure that was not measured is null."""

    ray_ratio_rank: float | None
    """Perdure's median seconds from the kill of a rank to the next step, divided by Ray Train's."""
    ray_ratio_node: float | None
    """The same for the kill of a machine."""
    lost_steps: int | None
    """The most steps that a trial of Perdure's did again."""
    actors_200_s: float | None
    """Seconds until as many actors as `actors` says run, in jobs with a node on each machine."""
    relaunch_10_s: float | None
    """Seconds from the kill of `lost` of them until all jobs are whole again."""
    actors: int
    lost: int
    trials: list[Trial]


def median(trials: Iterable[Trial], system: SystemName, fault: Fault) -> float | None:
    """Returns the median seconds of the trials that recovered."""
    seconds = [one.seconds for one in trials if (one.system, one.fault) == (system, fault) and one.seconds is not None]
    return statistics.median(seconds) if seconds else None


def ratio(trials: Iterable[Trial], fault: Fault) -> float | None:
    """Returns the ratio of the medians."""
    found = list(trials)
    ours, theirs = (median(found, system, fault) for system in SystemName)
    return None if ours is None or theirs is None else round(ours / theirs, 3)


def table(trials: list[Trial]) -> Table:
    """Returns the trials for people."""
    table = Table(title="Seconds from the kill to the first step of all ranks: median", title_justify="left")
    for column in ("killed", "system", "seconds", "steps done again", "recovered"):
        table.add_column(column)
    for fault in Fault:
        for system in SystemName:
            own = [one for one in trials if (one.system, one.fault) == (system, fault)]
            recovered = [one for one in own if one.seconds is not None]
            middle = median(own, system, fault)
            lost = ", ".join(str(one.lost) for one in recovered)
            table.add_row(
                fault, system, "-" if middle is None else f"{middle:.1f}", lost, f"{len(recovered)}/{len(own)}"
            )
    return table


async def recoveries(rounds: int, say: Say) -> list[Trial]:
    """Kills a rank and a machine of each system in turn, on one cluster."""
    python, variables = environment.ensure(), environment.variables()
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        cluster = RayCluster(Path(name), python=python, variables=quiet(variables))
        try:
            await cluster.start(machines=SIZE + 1)
            os.environ.update(cluster.variables)
            async with control_plane() as plane:
                for number, fault, system in ((n, f, s) for n in range(rounds) for f in Fault for s in SystemName):
                    with tempfile.TemporaryDirectory(prefix="ray-trial-", ignore_cleanup_errors=True) as place:
                        folder = Path(place)
                        if system is SystemName.PERDURE:
                            training = PerdureJob(plane.client, folder)
                        else:
                            training = RayTrainJob(cluster, folder, variables)
                        trial = await measure(training, system, fault, cluster=cluster, folder=folder)
                    trials.append(trial)
                    found = trial.problem or f"{trial.seconds:.1f} s, {trial.lost} steps done again"
                    say(f"{number + 1}/{rounds} {fault} killed, {system}: {found}")
        finally:
            await cluster.stop()
    return trials


async def actors(jobs: int, machines: int, lose: int, say: Say) -> many.Many:
    """Measures many actors on a cluster of their own."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        fleet_socket = folder / "fleet"
        variables: Mapping[str, str] = {"BENCH_FLEET": str(fleet_socket)}
        cluster = RayCluster(folder / "ray", machine_cpus=jobs, variables=variables)
        try:
            await cluster.start(machines=machines)
            os.environ.update(cluster.variables | {"PERDURE_RAY_NODE_PYTHON": str(many.LIGHT_NODE)})
            say(many.take_precedence())
            async with control_plane() as plane:
                temporal = await plane.client.connect()
                async with many.light_fleet(temporal, fleet_socket) as fleet:
                    return await many.measure(plane.client, fleet, jobs=jobs, machines=machines, lose=lose)
        finally:
            await cluster.stop()


def main(
    rounds: Annotated[int, typer.Option(help="How often each system has each kill; 0 leaves them out.")] = 5,
    jobs: Annotated[int, typer.Option(help="Jobs with a node on each machine; 0 leaves many actors out.")] = 20,
    machines: Annotated[int, typer.Option(help="Machines for many actors.")] = 10,
    lose: Annotated[int, typer.Option(help="Actors that are killed.")] = 10,
) -> None:
    """Measures recoveries on a Ray cluster, and many actors."""
    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(f"bench: {line}", markup=False, soft_wrap=True)

    trials = asyncio.run(recoveries(rounds, say)) if rounds else []
    crowd = asyncio.run(actors(jobs, machines, lose, say)) if jobs else None
    if trials:
        console.print(table(trials))
    if crowd is not None:
        say(
            f"{crowd.actors} actors of {crowd.jobs} jobs on {crowd.machines} machines run after {crowd.start_s:.1f} s; "
            f"{crowd.lost} killed, whole again after {crowd.relaunch_s:.1f} s; "
            f"{crowd.megabytes:.0f} MB for one actor and its node"
        )
    lost = [one.lost for one in trials if one.system is SystemName.PERDURE and one.lost is not None]
    figures = Figures(
        ray_ratio_rank=ratio(trials, Fault.RANK),
        ray_ratio_node=ratio(trials, Fault.NODE),
        lost_steps=max(lost, default=None),
        actors_200_s=None if crowd is None else round(crowd.start_s, 1),
        relaunch_10_s=None if crowd is None else round(crowd.relaunch_s, 1),
        actors=0 if crowd is None else crowd.actors,
        lost=0 if crowd is None else crowd.lost,
        trials=trials,
    )
    # The last line is one JSON object.
    print(figures.model_dump_json())


if __name__ == "__main__":
    typer.run(main)
