"""`make bench-faults`: one fault after another, each on a job of its own, and what the job makes of it."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.recovery.perdure_job import ControlPlane, control_plane
from benchmarks.recovery.processes import TrialFailed
from perdure.base.errors import PerdureError
from perdure.cli.explain import explanation

from .judgement import Outcome, judge
from .rows import ROWS, Row
from .site import Run

OUT = Path(__file__).with_name("out")
LOCAL = "local"


class Bench:
    """One run of the benchmark."""

    def __init__(self, folder: Path, plane: ControlPlane, console: Console) -> None:
        self.folder = folder
        """For the explanations of the jobs."""
        self.plane = plane
        self.console = console
        self._began = time.monotonic()

    async def fault(self, row: Row) -> Outcome:
        """Tries one fault, and returns its line of the matrix."""
        expected = row.expected
        if expected.missing:
            return Outcome(name=row.name, backend=LOCAL, within_s=expected.within, not_built=expected.missing)
        with tempfile.TemporaryDirectory(prefix="pf-") as parent:
            run = Run(self.plane, f"fault-{row.name}-{int(time.time()) % 100_000}", Path(parent) / "out", row.nodes)
            run.out.mkdir()
            run.folder.mkdir()
            try:
                await run.start(row.program, row.spec, {})
                fault_at = await row.injection.inject(run)
                story = await run.follow(expected, fault_at, lambda: row.injection.heal(run))
                return judge(expected, story, name=row.name, backend=LOCAL)
            except (TrialFailed, PerdureError) as failed:
                return Outcome(name=row.name, backend=LOCAL, within_s=expected.within, problem=f"{failed}")
            finally:
                await self._keep(run)
                row.injection.clear(run)
                await run.end()

    async def _keep(self, run: Run) -> None:
        try:
            incidents = await run.incidents()
        except PerdureError as error:
            self.say(f"{run.name}: {error}")
            return
        told = (explanation(incident, job=run.name, flag="").plain for incident in incidents)
        (self.folder / f"{run.name}.explain").write_text("\n\n".join(told) + "\n", encoding="utf-8")
        shown = "[" + ",\n".join(incident.model_dump_json(indent=1) for incident in incidents) + "]\n"
        (self.folder / f"{run.name}.json").write_text(shown, encoding="utf-8")

    def say(self, line: str) -> None:
        self.console.print(f"{time.monotonic() - self._began:7.1f}s  {line}", markup=False)


def matrix(outcomes: list[Outcome]) -> Table:
    """The table of all faults."""
    table = Table("fault", "detected (s)", "goal (s)", "decided (s)", "class", "culprit", "action", "steps lost")
    for outcome in outcomes:
        goal = f"{outcome.within_s:g}"
        if outcome.not_built:
            table.add_row(outcome.name, "not built", goal)
            continue
        seconds = ("-" if one is None else f"{one:.2f}" for one in (outcome.detected_s, outcome.decided_s))
        detected, decided = seconds
        oks = (outcome.class_ok, outcome.culprit_ok, outcome.action_ok)
        right = ("-" if ok is None else "right" if ok else "WRONG" for ok in oks)
        lost = "-" if outcome.steps_lost is None else f"{outcome.steps_lost}"
        table.add_row(outcome.name, detected, goal, decided, *right, lost)
    return table


def chosen(only: str) -> list[Row]:
    """The rows with these names, separated by commas; all without one.

    Raises:
        typer.BadParameter: if there is no row of such a name.
    """
    names = [name for name in only.split(",") if name]
    if unknown := set(names) - {row.name for row in ROWS}:
        raise typer.BadParameter(f"no fault is called {', '.join(sorted(unknown))}")
    return [row for row in ROWS if not names or row.name in names]


def main(
    only: Annotated[str, typer.Option(help="Names of faults, separated by commas; all by default.")] = "",
    backend: Annotated[str, typer.Option(help="The backend of the jobs' nodes.")] = LOCAL,
    out: Annotated[Path | None, typer.Option(help="Folder for the explanations.")] = None,
) -> None:
    """Injects known faults one at a time, and compares what jobs find and do with what must come out."""
    if backend != LOCAL:
        raise typer.BadParameter(f"faults are made on the backend {LOCAL} only")
    rows = chosen(only)
    folder = out or OUT / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True, width=120)
    outcomes: list[Outcome] = []

    async def run() -> None:
        async with control_plane() as plane:
            bench = Bench(folder, plane, console)
            for row in rows:
                bench.say(f"{row.name} on {row.program.name} ...")
                outcomes.append(await bench.fault(row))
                bench.say(f"{row.name}: {outcomes[-1].summary}")

    asyncio.run(run())
    console.print(matrix(outcomes))
    console.print(f"explanations: {folder}")
    print(json.dumps({"faults": [outcome.model_dump() for outcome in outcomes]}, separators=(",", ":")))


if __name__ == "__main__":
    typer.run(main)
