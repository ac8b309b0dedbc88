"""`make bench-events`: what events cost, and how many are exported; ends with one line of JSON."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.events.emission import DEAD, events_per_second, measure_costs
from benchmarks.events.steps import STEPS, measure_overhead
from perdure_training.events import AsyncExporter, FileExporter, TrainerEvents


def main(
    count: Annotated[int, typer.Option(min=1000, help="Events of each measurement of costs.")] = 200_000,
    pairs: Annotated[int, typer.Option(min=4, help=f"Blocks of {STEPS} steps with events, and without.")] = 100,
) -> None:
    """Measures events."""
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="perdure-events-") as name:
        folder = Path(name)
        exporter = AsyncExporter(FileExporter(folder / "steps.jsonl"))
        overhead = measure_overhead(TrainerEvents(exporter, rank=0, generation=1), pairs=pairs)
        exporter.close()
        rate = events_per_second(folder, count=count)
        # Threads of destinations that hang remain, so this comes last.
        costs = measure_costs(folder, count=count)
    table = Table("destination", "p50", "p99", "longest", "dropped", title="One event, in us of the program")
    for what, cost in costs.items():
        figures = (f"{cost.p50:.1f}", f"{cost.p99:.1f}", f"{cost.longest:,.0f}", f"{cost.dropped:,}")
        table.add_row(what, *figures)
    console.print(table)
    low, high = overhead.spread
    console.print(f"{rate:,.0f} events a second reach a file")
    console.print(
        f"a step of {overhead.step_ms:.1f} ms with three events: {overhead.percent:+.2f}% "
        f"(quartiles of {pairs} pairs {low:+.2f}% to {high:+.2f}%)"
    )
    print(
        json.dumps(
            {
                "emit_p50_us": round(max(costs[what].p50 for what in DEAD), 2),
                "emit_p99_us": round(max(costs[what].p99 for what in DEAD), 2),
                "events_per_s": round(rate),
                "step_overhead_pct": round(overhead.percent, 2),
            }
        )
    )


if __name__ == "__main__":
    typer.run(main)
