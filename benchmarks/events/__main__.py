"""`make bench-events`: what events cost, and how many are exported; ends with one line of JSON.

`BENCH_ARGS="--fleet 64 --minutes 10"` also runs a job of so many nodes with all telemetry, and the same without.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.events.collector import collecting
from benchmarks.events.emission import DEAD, IN_TRAINING, NOTHING, Cost, events_per_second, measure_costs
from benchmarks.events.fleet import PARTS, Side, measure_side
from benchmarks.events.steps import STEPS, Overhead, Ratio, measure_overhead
from perdure_training.events import AsyncExporter, FileExporter, TrainerEvents, to_collector


def main(
    count: Annotated[int, typer.Option(min=1000, help="Events of each measurement of costs.")] = 100_000,
    pairs: Annotated[int, typer.Option(min=4, help=f"Blocks of {STEPS} steps with telemetry, and without.")] = 60,
    fleet: Annotated[int, typer.Option(min=0, help="Nodes of a job with all telemetry and without; 0: no job.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="For each of these jobs.")] = 10.0,
) -> None:
    """Measures events."""
    console = Console(width=120, highlight=False)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="perdure-events-") as name:
        folder = Path(name)
        found |= _report_overhead(_overhead(folder, pairs=pairs), console)
        rate = events_per_second(folder, count=count)
        console.print(f"{rate:,.0f} events a second reach a file")
        found["events_per_s"] = round(rate)
        if fleet:
            found |= _report_fleet(_fleet(fleet, minutes, console), console)
        # Threads of destinations that hang remain, so this comes last.
        found |= _report_costs(measure_costs(folder, count=count), console)
    print(json.dumps(found))


def _overhead(folder: Path, *, pairs: int) -> Overhead:
    """Measures steps with all that a rank has: events in a file and on their way to a collector, and progress."""
    rank = {"PERDURE_PROGRESS_DIR": str(folder / "progress"), "PERDURE_RUN_ID": "bench", "RANK": "0"}
    with collecting() as collector:
        os.environ.update(rank)
        to_otlp = to_collector({"OTEL_EXPORTER_OTLP_ENDPOINT": collector})
        assert to_otlp is not None
        exporters = AsyncExporter(FileExporter(folder / "steps.jsonl")), to_otlp
        try:
            return measure_overhead(TrainerEvents(*exporters, rank=0, generation=1), pairs=pairs)
        finally:
            for exporter in exporters:
                exporter.close()


def _report_overhead(overhead: Overhead, console: Console) -> dict[str, float]:
    def text(ratio: Ratio) -> str:
        low, high = ratio.interval
        return f"{ratio.percent:+.2f}% (95% confidence: {low:+.2f}% to {high:+.2f}%)"

    pairs = len(overhead.wall.pairs)
    console.print(f"a step of {overhead.step_ms:.1f} ms with all telemetry, {pairs} pairs of {STEPS} steps:")
    console.print(f"  time {text(overhead.wall)}")
    console.print(f"  processor time of the process {text(overhead.cpu)}")
    return {
        "step_overhead_pct": round(overhead.wall.percent, 2),
        "step_overhead_low_pct": round(overhead.wall.interval[0], 2),
        "step_overhead_high_pct": round(overhead.wall.interval[1], 2),
        "step_overhead_cpu_pct": round(overhead.cpu.percent, 2),
    }


def _report_costs(costs: dict[str, Cost], console: Console) -> dict[str, float]:
    table = Table("destination", "p50", "p99", "longest", "dropped", title="One event, in us of the program")
    for what, cost in costs.items():
        table.add_row(what, f"{cost.p50:.1f}", f"{cost.p99:.1f}", f"{cost.longest:,.0f}", f"{cost.dropped:,}")
    console.print(table)
    return {
        "emit_p50_us": round(max(costs[what].p50 for what in DEAD), 2),
        "emit_p99_us": round(max(costs[what].p99 for what in DEAD), 2),
        "emit_after_step_p50_us": round(costs[IN_TRAINING].p50, 2),
        "emit_after_step_p99_us": round(costs[IN_TRAINING].p99, 2),
        "nothing_after_step_p50_us": round(costs[NOTHING].p50, 2),
    }


def _fleet(nodes: int, minutes: float, console: Console) -> tuple[Side, Side]:
    """Returns the job without and with telemetry."""

    def measure(*, telemetry: bool) -> Side:
        console.print(f"bench: {nodes} nodes {'with all' if telemetry else 'without'} telemetry")
        say = console.print
        return asyncio.run(measure_side(telemetry=telemetry, nodes=nodes, seconds=minutes * 60, say=say))

    return measure(telemetry=False), measure(telemetry=True)


def _report_fleet(sides: tuple[Side, Side], console: Console) -> dict[str, float]:
    without, with_all = sides
    table = Table(
        *("part", "without", "with", "MB without", "MB with"),
        title=f"Processor time in % of a core, in {with_all.seconds / 60:.1f} minutes",
    )
    found: dict[str, float] = {}
    for part in PARTS:
        before, after = without.parts[part], with_all.parts[part]
        percent = (f"{before.cpu_percent:.2f}", f"{after.cpu_percent:.2f}")
        table.add_row(part, *percent, f"{before.megabytes:,.0f}", f"{after.megabytes:,.0f}")
        found[f"fleet_{part}_added_cpu_pct"] = round(after.cpu_percent - before.cpu_percent, 2)
    console.print(table)
    console.print(
        f"a scrape of all nodes takes {with_all.scrape_ms or 0:.0f} ms and has {with_all.scrape_bytes:,} bytes; "
        f"the collector got {with_all.collected / with_all.seconds:,.0f} bytes a second"
    )
    return found | {"fleet_scrape_ms": round(with_all.scrape_ms or 0.0)}


if __name__ == "__main__":
    typer.run(main)
