"""The tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .records import PEERS, Composition, Scenario, SystemName, TrialRecord
from .summary import Steady, headline, median_composition, ratio_to_better_peer, summarize

PARTS = {
    "happened": "first sign",
    "noticed": "noticed",
    "decided": "decided",
    "commanded": "survivors commanded",
    "entered": "rendezvous entered",
    "process_started": "process started",
    "imported": "torch imported",
    "grouped": "process group",
    "stepped": "first step",
}
GOALS = {Scenario.WORKER: 0.5, Scenario.NODE_REPLACED: 0.5, Scenario.NODE_LOST: 0.15}


def recovery_table(records: Sequence[TrialRecord], unavailable: dict[SystemName, str]) -> Table:
    table = Table(title="Seconds from SIGKILL to the first step of all ranks: median (recovered/trials)")
    table.add_column("system")
    for scenario in Scenario:
        table.add_column(scenario.title, justify="right")
    for system in (*PEERS, SystemName.PERDURE, SystemName.PERDURE_WITHHELD):
        if system in unavailable:
            table.add_row(system, *["not available"] * len(Scenario))
            continue
        cells = [summarize(records, system, scenario) for scenario in Scenario]
        if any(cells):
            table.add_row(
                system,
                *(
                    "" if cell is None else f"{number(cell.median_seconds)} ({cell.recovered}/{cell.trials})"
                    for cell in cells
                ),
            )
    table.add_section()
    table.add_row("ratio to the better peer", *(number(ratio_to_better_peer(records, s), digits=2) for s in Scenario))
    table.add_row("goal", *(f"<= {goal}" for goal in GOALS.values()))
    return table


def composition_table(records: Sequence[TrialRecord]) -> Table:
    table = Table(title="Where Perdure's time goes: seconds since the kill, medians")
    table.add_column("until")
    columns: list[Composition] = []
    for system, scenarios in ((SystemName.PERDURE, tuple(Scenario)), (SystemName.PERDURE_WITHHELD, tuple(Scenario))):
        for scenario in scenarios:
            trials = [record for record in records if (record.system, record.scenario) == (system, scenario)]
            if trials:
                suffix = "" if system is SystemName.PERDURE else ", lease only"
                table.add_column(f"{scenario.title}{suffix}", justify="right")
                columns.append(median_composition(trials))
    for name, title in PARTS.items():
        table.add_row(title, *(number(getattr(column, name)) for column in columns))
    return table


def steady_table(steady: Steady) -> Table:
    table = Table(title=f"Cost at rest, over {steady.seconds:.0f} s of undisturbed training")
    table.add_column("process")
    table.add_column("% of a core", justify="right")
    table.add_column("resident MB", justify="right")
    for cost in steady.costs:
        name = cost.what if cost.processes == 1 else f"{cost.what} (mean of {cost.processes})"
        table.add_row(name, f"{cost.cpu_percent:.2f}", f"{cost.rss_mb:.0f}")
    table.caption = f"TrainingJob's history grew by {steady.job_events_per_minute:.1f} events a minute"
    return table


def number(value: float | None, *, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def print_report(
    console: Console, records: Sequence[TrialRecord], steady: Steady | None, unavailable: dict[SystemName, str]
) -> None:
    """The tables, what went wrong, and the headline as one line of JSON."""
    console.print(recovery_table(records, unavailable))
    if any(record.system is SystemName.PERDURE for record in records):
        console.print(composition_table(records))
    if steady:
        console.print(steady_table(steady))
    for system, reason in unavailable.items():
        console.print(f"{system}: {reason}", markup=False)
    for record in records:
        if record.error:
            console.print(f"{record.system} {record.scenario.title} #{record.number}: {record.error}", markup=False)
    print(headline(records, steady).model_dump_json(), flush=True)
