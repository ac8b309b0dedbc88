"""Prepares the tables for the terminal, and as Markdown for the documentation."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

from .dlrover_environment import VERSION as DLROVER_VERSION
from .records import OURS, PEERS, Scenario, SystemName, TrialRecord
from .summary import SINGLE_FAULTS, Steady, headline, median_composition, ratio_to_better_peer, summarize

PARTS = {
    "happened": "first sign",
    "noticed": "job notices",
    "decided": "job has decided",
    "commanded": "survivors have the world",
    "entered": "rendezvous entered",
    "process_started": "processes started",
    "imported": "torch imported",
    "grouped": "process group formed",
    "stepped": "all ranks stepped",
}
GOALS = {Scenario.WORKER: 0.5, Scenario.NODE_REPLACED: 0.5, Scenario.NODE_LOST: 0.15}


@dataclass(frozen=True)
class Grid:
    """A table, independent of its rendering."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def draw(self) -> Table:
        table = Table(title=self.title, caption=self.note or None, title_justify="left", caption_justify="left")
        for position, column in enumerate(self.columns):
            table.add_column(column, justify="right" if position else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.columns, ("-",) * len(self.columns), *self.rows]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{self.title}\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")


def recovery_grid(records: Sequence[TrialRecord], unavailable: Mapping[SystemName, str]) -> Grid:
    scenarios = [s for s in Scenario if s in GOALS or any(record.scenario is s for record in records)]
    rows: list[tuple[str, ...]] = []
    for system in (*PEERS, *OURS, SystemName.FLOOR):
        cells = [summarize(records, system, scenario) for scenario in scenarios]
        if any(cells):
            texts = (
                "" if cell is None else f"{number(cell.median_seconds)} ({cell.recovered}/{cell.trials})"
                for cell in cells
            )
            rows.append((system.value, *texts))
        elif system in unavailable:
            rows.append((system.value, *["not available"] * len(scenarios)))
    rows.append(("Perdure / better peer", *(number(ratio_to_better_peer(records, s), digits=2) for s in scenarios)))
    rows.append(("goal", *(f"<= {GOALS[scenario]}" if scenario in GOALS else "" for scenario in scenarios)))
    return Grid(
        "Seconds from SIGKILL to the first step of all ranks: median of those that recovered (recovered/trials)",
        ("system", *(scenario.title for scenario in scenarios)),
        tuple(rows),
    )


def caught_up_grid(records: Sequence[TrialRecord]) -> Grid:
    """Tabulates the work that was done again."""
    rows: list[tuple[str, ...]] = []
    for system in (*PEERS, *OURS):
        cells = [summarize(records, system, scenario) for scenario in SINGLE_FAULTS.values()]
        if any(cells):
            texts = (
                ""
                if cell is None
                else f"{number(cell.median_steps_redone, digits=0)}, {number(cell.median_caught_up_seconds)} s"
                for cell in cells
            )
            rows.append((system.value, *texts))
    return Grid(
        "Steps done again, and seconds from SIGKILL until past the step that the job had: medians",
        ("system", *(scenario.title for scenario in SINGLE_FAULTS.values())),
        tuple(rows),
    )


def composition_grid(records: Sequence[TrialRecord]) -> Grid:
    columns = ["until"]
    medians: list[Mapping[str, float | None]] = []
    for system in OURS:
        for scenario in Scenario:
            trials = [record for record in records if (record.system, record.scenario) == (system, scenario)]
            if trials:
                columns.append(scenario.title + system.value.removeprefix(SystemName.PERDURE.value))
                medians.append(median_composition(trials).model_dump())
    rows = tuple((title, *(number(median[name], digits=2) for median in medians)) for name, title in PARTS.items())
    return Grid("Where Perdure's time goes: seconds since the kill, medians", tuple(columns), rows)


def steady_grid(steady: Steady) -> Grid:
    rows = tuple(
        (
            cost.what if cost.processes == 1 else f"{cost.what} (mean of {cost.processes})",
            f"{cost.cpu_percent:.2f}",
            f"{cost.private_mb:.0f}",
            f"{cost.rss_mb:.0f}",
        )
        for cost in steady.costs
    )
    return Grid(
        f"Idle cost, over {steady.seconds:.0f} s of undisturbed training on two nodes",
        ("process", "% of a core", "private MB", "resident MB"),
        rows,
        note=f"TrainingJob's history grew by {steady.job_events_per_minute:.1f} events a minute.",
    )


def machine() -> str:
    """Describes the machine and software of the measurement."""
    memory = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "temporalio"))
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {versions}, dlrover {DLROVER_VERSION}; "
        "two ranks of DDP over gloo, 50 ms a step"
    )


def grids(records: Sequence[TrialRecord], steady: Steady | None, unavailable: Mapping[SystemName, str]) -> list[Grid]:
    """Returns the tables for which there are results."""
    found = [recovery_grid(records, unavailable), caught_up_grid(records)]
    if any(record.system in OURS for record in records):
        found.append(composition_grid(records))
    if steady:
        found.append(steady_grid(steady))
    return found


def markdown(records: Sequence[TrialRecord], steady: Steady | None, unavailable: Mapping[SystemName, str]) -> str:
    """Returns the tables as Markdown for the documentation."""
    tables = "\n".join(grid.markdown() for grid in grids(records, steady, unavailable))
    return f"Measured by `make bench-recovery` on {machine()}.\n\n{tables}"


def print_report(
    console: Console, records: Sequence[TrialRecord], steady: Steady | None, unavailable: Mapping[SystemName, str]
) -> None:
    """Prints the tables, the errors, and the headline as one line of JSON."""
    for grid in grids(records, steady, unavailable):
        console.print(grid.draw())
    for system, reason in unavailable.items():
        console.print(f"{system}: {reason}", markup=False)
    for record in records:
        if record.error:
            console.print(f"{record.system} {record.scenario.title} #{record.number}: {record.error}", markup=False)
    print(headline(records, steady).model_dump_json(), flush=True)


def number(value: float | None, *, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
