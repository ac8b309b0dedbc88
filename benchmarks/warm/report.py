"""Prepares the tables for the terminal, and as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from benchmarks.recovery.records import SystemName, TrialRecord
from benchmarks.recovery.report import Grid, machine, number, recovery_grid

from .scripts import ScriptTrial
from .steady import StepTimes
from .summary import headline, ratio_to_floor, script_rows

GOALS = ("goals of the two", "<= 0.15, <= 0.25", "", "")


def grids(
    records: Sequence[TrialRecord],
    script_trials: Sequence[ScriptTrial],
    step_times: StepTimes | None,
    unavailable: Mapping[SystemName, str],
) -> list[Grid]:
    """Returns the tables for which there are results."""
    found: list[Grid] = []
    for size in sorted({record.size for record in records}):
        of_size = [record for record in records if record.size == size]
        grid = recovery_grid(of_size, unavailable)
        # The last row of the grid contains the goals of bench-recovery.
        rows = (*grid.rows[:-1], ("Perdure / bare processes", number(ratio_to_floor(of_size), digits=2), "", ""), GOALS)
        found.append(Grid(f"{size} nodes. {grid.title}", grid.columns, rows))
    if script_trials:
        rows = tuple(
            (
                row.script,
                f"{row.recovered}/{row.runs}",
                str(row.warm),
                str(row.learned),
                number(row.median_seconds, digits=2),
                number(row.slowest_seconds, digits=2),
                number(row.median_start_seconds),
            )
            for row in script_rows(script_trials)
        )
        columns = ("script", "recovered", "warm", "had learned", "median s", "slowest s", "first start s")
        found.append(Grid("A rank killed in a job of two nodes, by kind of script", columns, rows))
    if step_times:
        rows = (
            ("started", f"{1e3 * step_times.started_seconds:.3f}"),
            ("forked", f"{1e3 * step_times.forked_seconds:.3f}"),
            ("forked / started, goal <= 1.005", f"{step_times.ratio:.4f}"),
        )
        note = f"The warm interpreter holds {step_times.interpreter_mb:.0f} MB (proportional set size)."
        found.append(Grid("One rank's step time", ("rank", "median ms"), rows, note))
    return found


def markdown(
    records: Sequence[TrialRecord],
    script_trials: Sequence[ScriptTrial],
    step_times: StepTimes | None,
    unavailable: Mapping[SystemName, str],
) -> str:
    """Returns the tables as Markdown for the documentation."""
    tables = "\n".join(grid.markdown() for grid in grids(records, script_trials, step_times, unavailable))
    return f"Measured by `make bench-warm` on {machine()}.\n\n{tables}"


def print_report(
    console: Console,
    records: Sequence[TrialRecord],
    script_trials: Sequence[ScriptTrial],
    step_times: StepTimes | None,
    unavailable: Mapping[SystemName, str],
) -> None:
    """Prints the tables, the errors, and the headline as one line of JSON."""
    for grid in grids(records, script_trials, step_times, unavailable):
        console.print(grid.draw())
    for record in records:
        if record.error:
            title = f"{record.system}, {record.size} nodes, {record.scenario.title}"
            console.print(f"{title} #{record.number}: {record.error}", markup=False)
    for trial in script_trials:
        if trial.error:
            console.print(f"{trial.script} #{trial.number}: {trial.error}", markup=False)
    print(headline(records, script_trials, step_times).model_dump_json(), flush=True)
