"""`make bench-scaling`: jobs that choose their size by speed, and clusters that are shared; ends with one line of JSON.

First real jobs on this machine whose steps follow known laws, then a cluster in virtual time that plays a trace under
Perdure's rule and under those that it is compared with.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.recovery.perdure_job import control_plane

from . import monitor, real_jobs, trace
from .rules import DLRoverRM, Perdure, Pollux, overtaking, static
from .simulation import Result, Rule, simulate
from .trace import GPUS_OF_A_NODE, TraceJob

NOT_RUN = "not run"
_JOBS_OF_A_NODE = 6
"""Jobs of a trace that is made."""
_RATIOS = ("jct_ratio_static", "jct_ratio_rm", "jct_ratio_pollux", "worst_slowdown")


def play(jobs: Sequence[TraceJob], nodes: int, gpus_of_a_node: int = GPUS_OF_A_NODE) -> dict[str, Result]:
    """Plays a trace under each rule."""
    rules: dict[str, Rule] = {
        "static": static,
        "static, overtaking": overtaking,
        "dlrover-rm": DLRoverRM(gpus_of_a_node),
        "pollux": Pollux(),
        "perdure": Perdure(),
    }
    return {name: simulate(jobs, nodes, rule) for name, rule in rules.items()}


def slowdowns(found: Result, before: Result) -> list[float]:
    """Returns how many times as long each job takes as before, ascending."""
    return sorted(time / before.completions[name] for name, time in found.completions.items())


def table(played: dict[str, dict[str, Result]], gpus_of_a_node: int = GPUS_OF_A_NODE) -> Table:
    """Returns the results for people."""
    shown = Table(title="Traces under each rule", title_justify="left")
    for column in ("trace", "rule", "mean", "p99", "wait", "in use", "GPU-hours", "changes", "mean/static", "slowest"):
        shown.add_column(column)
    for name, results in played.items():
        before = results["static"]
        for rule, found in results.items():
            shown.add_row(
                name,
                rule,
                *(f"{seconds:,.0f} s" for seconds in (found.mean, found.p99, found.wait)),
                f"{found.utilisation:.0%}",
                f"{found.node_hours * gpus_of_a_node:,.0f}",
                f"{found.changes:.1f}",
                f"{found.mean / before.mean:.2f}",
                f"{slowdowns(found, before)[-1]:.2f}",
            )
    return shown


def simulated(played: dict[str, dict[str, Result]]) -> dict[str, float]:
    """Returns the figures of all traces: ratios of mean completion times, in the geometric mean."""

    def ratio(rule: str) -> float:
        return round(geometric_mean(found["perdure"].mean / found[rule].mean for found in played.values()), 3)

    return {
        "jct_ratio_static": ratio("static"),
        "jct_ratio_rm": ratio("dlrover-rm"),
        "jct_ratio_pollux": ratio("pollux"),
        "worst_slowdown": round(max(slowdowns(found["perdure"], found["static"])[-1] for found in played.values()), 2),
    }


def _made(nodes: int, load: float, seed: int) -> list[TraceJob]:
    return trace.make(nodes=nodes, jobs=max(nodes, 16) * _JOBS_OF_A_NODE, load=load, seed=seed)


def ranges(seeds: Sequence[int], gpus: str, loads: str, *, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Returns the smallest and the largest figure over traces of other seeds, on all clusters but the largest."""
    sizes = sorted(int(text) // GPUS_OF_A_NODE for text in gpus.split(",") if text)
    found: list[dict[str, float]] = []
    for seed in seeds:
        played = {
            f"{nodes}, {load}": play(_made(nodes, float(load), seed), nodes)
            for nodes in sizes[:-1] or sizes
            for load in loads.split(",")
        }
        found.append(simulated(played))
        say(f"seed {seed}: {found[-1]}")
    return {key: [min(one[key] for one in found), max(one[key] for one in found)] for key in _RATIOS if found}


def main(
    laws: Annotated[int, typer.Option(help="Real jobs, each with a law of its own; 0 for none.")] = 20,
    seconds: Annotated[float, typer.Option(help="How long each of them trains.")] = 300.0,
    together: Annotated[int, typer.Option(help="Real jobs at once.")] = 2,
    gpus: Annotated[str, typer.Option(help="Sizes of clusters in virtual time, with commas; empty for none.")] = (
        "64,512,4096"
    ),
    loads: Annotated[str, typer.Option(help="What jobs ask for, in times of what the cluster can do.")] = "0.7,1.0,1.3",
    trace_file: Annotated[Path | None, typer.Option("--trace", help="A trace (trace.py) instead of one made.")] = None,
    gpus_of_a_node: Annotated[
        int, typer.Option(help="GPUs by which jobs of --trace grow and shrink.")
    ] = GPUS_OF_A_NODE,
    seed: Annotated[int, typer.Option(help="Of laws and traces.")] = 1,
    other_seeds: Annotated[str, typer.Option(help="Seeds of further traces, for ranges; empty for none.")] = (
        "2,3,4,5,6"
    ),
    machines: Annotated[int, typer.Option(help="Machines of the cluster that is watched; 0 for none.")] = 5000,
    label_bytes: Annotated[int, typer.Option(help="Bytes of the labels of each.")] = 0,
) -> None:
    """Measures how well numbers of nodes are chosen and shared."""
    console = Console(highlight=False, width=150)

    def say(line: str) -> None:
        console.print(f"bench: {line}", markup=False, soft_wrap=True)

    async def real() -> dict[str, float | int | None]:
        async with control_plane() as plane:
            known = real_jobs.laws(laws, seed=seed)
            return real_jobs.summary(
                await real_jobs.run_all(plane.client, known, seconds=seconds, together=together, say=say)
            )

    figures: dict[str, object] = dict(asyncio.run(real())) if laws else dict.fromkeys(real_jobs.KEYS, NOT_RUN)
    played: dict[str, dict[str, Result]] = {}
    for size in (int(text) for text in gpus.split(",") if text):
        if trace_file is not None:
            nodes = size // gpus_of_a_node
            read = trace.read(trace_file, nodes=nodes, gpus_of_a_node=gpus_of_a_node)
            played[f"{size} GPUs, {trace_file.name}"] = play(read, nodes, gpus_of_a_node)
            continue
        nodes = size // GPUS_OF_A_NODE
        for load in (float(text) for text in loads.split(",")):
            played[f"{size} GPUs, load {load:g}"] = play(_made(nodes, load, seed), nodes)
            say(f"{size} GPUs at load {load:g} played")
    if played:
        console.print(table(played, gpus_of_a_node if trace_file is not None else GPUS_OF_A_NODE))
    figures |= simulated(played) if played else dict.fromkeys(_RATIOS, NOT_RUN)
    if played and trace_file is None:
        figures["other_seeds"] = ranges([int(text) for text in other_seeds.split(",") if text], gpus, loads, say=say)
    seen: dict[str, float | str] = dict.fromkeys(monitor.KEYS, NOT_RUN)
    if machines:
        seen = asyncio.run(monitor.measure(machines, say, label_bytes=label_bytes))
    # The last line is one JSON object.
    print(json.dumps(figures | seen))


if __name__ == "__main__":
    typer.run(main)
