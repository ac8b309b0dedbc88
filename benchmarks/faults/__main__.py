"""`make bench-faults`: one fault after another, each on a job of its own, and what the job makes of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.recovery.perdure_job import ControlPlane, control_plane
from benchmarks.recovery.processes import TrialFailed
from perdure.base.errors import PerdureError
from perdure.cli.explain import explanation
from perdure.spec.timing import StallTiming, StragglerTiming

from . import peers as peer_systems
from .judgement import CleanRun, Outcome, Throughput, judge, judge_clean
from .machines import ENVIRONMENT, PLACED_WORKER, machines
from .peers import PeerOutcome
from .ray_site import RAY_ROWS, RaySite, ray_site
from .rows import DDP, PROFILES, REPLACED, ROWS, STRAGGLER, Row
from .site import Run

OUT = Path(__file__).with_name("out")


class Backend(StrEnum):
    """Where the jobs of the matrix run."""

    LOCAL = "local"
    RAY = "ray"


SHORTEST_PATIENCE = 30.0
"""The shortest time to wait for a verdict, in seconds."""
LONGEST_STALL = 900.0
"""Seconds after which each kind of hang has been found, with the default times."""
CLEAN_NODES = 3
CLEAN_SECONDS = 30.0
"""Seconds of steps of a run without faults, at least."""
LONGEST_PAUSE = 600.0
"""Seconds in which each pause of a profile comes twice, with the default times."""
WINDOW = 10.0
"""Seconds over which steps are counted, where throughput is measured."""


def scaled_timing(scale: float) -> dict[str, Any]:
    """The fields of a job whose stalls and slow ranks are judged in a fraction of the default times."""
    stall, slow = StallTiming(), StragglerTiming()

    def scaled(time: timedelta) -> str:
        return f"{time.total_seconds() * scale:.3f}s"

    times = {"after": scaled(stall.after), "first_look": scaled(stall.first_look)}
    return {"timing": {"stall": times, "stragglers": {"restart_cost": scaled(slow.restart_cost)}}}


class Bench:
    """One run of the benchmark."""

    def __init__(
        self,
        folder: Path,
        plane: ControlPlane,
        console: Console,
        *,
        scale: float,
        settle: float,
        site: RaySite | None = None,
    ) -> None:
        self.folder = folder
        """For the explanations of the jobs."""
        self.scale = scale
        self.settle = settle
        """Seconds of steps before a fault, at least."""
        self.plane = plane
        self.console = console
        self.site = site
        """Set: the jobs run there."""
        self.backend = Backend.LOCAL if site is None else Backend.RAY
        self._began = time.monotonic()

    async def fault(self, row: Row) -> Outcome:
        """Tries one fault, and returns its line of the matrix."""
        expected = row.expected
        line = Outcome(name=row.name, backend=self.backend, within_s=expected.within)
        if lacks := expected.missing:
            return line.model_copy(update={"not_built": lacks})
        if self.site is not None:
            await self.site.make_whole()
        patience = max(3 * expected.within, SHORTEST_PATIENCE, LONGEST_STALL * self.scale)
        async with self._run(f"fault-{row.name}", row.nodes, row.processes) as run:
            try:
                row.injection.prepare(run)
                environment = {**row.environment, **(ENVIRONMENT if row.injection.placed else {})}
                spec = {"backend": self.backend, **scaled_timing(self.scale), **row.spec}
                await run.start(row.program, spec, environment)
                await asyncio.sleep(max(self.settle, WINDOW if row.throughput else 0.0))
                fault_at = await row.injection.inject(run)
                story = await run.follow(expected, fault_at, lambda: row.injection.heal(run), patience=patience)
                outcome = judge(expected, story, name=row.name, backend=self.backend)
                return await self._with_throughput(run, outcome, fault_at) if row.throughput else outcome
            except (TrialFailed, PerdureError, psutil.Error, OSError) as failed:
                return line.model_copy(update={"problem": f"not tried: {failed}"})
            finally:
                with suppress(TrialFailed):
                    row.injection.clear(run)

    async def _with_throughput(self, run: Run, outcome: Outcome, fault_at: float) -> Outcome:
        """Adds the steps a second of a job that has repaired a fault."""
        await asyncio.sleep(WINDOW)
        now, acted_at = time.time(), fault_at + (outcome.detected_s or 0.0)
        throughput = Throughput(
            before=run.pace(fault_at - WINDOW, fault_at),
            during=run.pace(fault_at, acted_at),
            after=run.pace(now - WINDOW, now),
        )
        return outcome.model_copy(update={"throughput": throughput})

    async def clean(self, profile: str) -> CleanRun:
        """Trains without a fault for a while, and returns what was said of it."""
        async with self._run(f"clean-{profile}", CLEAN_NODES) as run:
            environment = {"FAULTS_PROFILE": json.dumps({"kind": profile, "scale": self.scale})}
            try:
                await run.start(DDP, scaled_timing(self.scale), environment)
                await asyncio.sleep(max(CLEAN_SECONDS, LONGEST_PAUSE * self.scale))
                return judge_clean(profile, await run.incidents())
            except (TrialFailed, PerdureError) as failed:
                return CleanRun(profile=profile, problem=f"{failed}")

    @asynccontextmanager
    async def _run(self, name: str, nodes: int, processes: int = 1) -> AsyncGenerator[Run]:
        """Provides a job to start; ends it, and keeps what it said."""
        with tempfile.TemporaryDirectory(prefix="pf-", ignore_cleanup_errors=True) as parent:
            title, out = f"{name}-{int(time.time()) % 100_000}", Path(parent) / "out"
            run = Run(self.plane, title, out, nodes, processes, self.site)
            run.out.mkdir()
            run.folder.mkdir()
            try:
                yield run
            finally:
                await self._keep(run)
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


@dataclass(frozen=True)
class Plan:
    """What one run of the benchmark tries."""

    rows: Sequence[Row]
    profiles: Sequence[str]
    """The profiles of the trainings without a fault, one for each of them."""
    overhead: bool
    """Whether the cost of the evidence is measured."""


def plan(only: str, *, clean: bool, clean_runs: int, backend: Backend = Backend.LOCAL) -> Plan:
    """Returns what is tried.

    Args:
        only: Names of faults and of profiles without a fault, separated by commas; nothing else is tried then.
        clean: Whether no fault is tried.
        clean_runs: The number of trainings without a fault, whose profiles take turns, where none is named.
        backend: Where jobs run. On Ray no node has a network of its own; what is measured without faults is the same.

    Raises:
        typer.BadParameter: if there is no fault and no profile of such a name.
    """
    names = {name for name in only.split(",") if name}
    on_ray = backend is Backend.RAY
    rows = [row for row in (*ROWS, *RAY_ROWS) if not row.injection.placed] if on_ray else list(ROWS)
    if unknown := names - {row.name for row in rows} - set(PROFILES):
        raise typer.BadParameter(f"no fault and no profile is called {', '.join(sorted(unknown))}")
    if names:
        return Plan([row for row in rows if row.name in names], [one for one in PROFILES if one in names], False)
    profiles = [] if on_ray and not clean else list(islice(cycle(PROFILES), clean_runs))
    return Plan([] if clean else rows, profiles, not clean and not on_ray)


def listed() -> Table:
    """The table of all that can be tried, with what must come out."""
    table = Table("name", "program", "class", "nodes", "action", "within (s)")
    for row in (*ROWS, *RAY_ROWS):
        due = row.expected
        what = f"{due.failure} {due.hang}".strip() or f"shown: {due.shown}"
        nodes = ", ".join(map(str, sorted(due.culprits)))
        table.add_row(row.name, row.program.name, what, nodes, ", ".join(sorted(due.actions)), f"{due.within:g}")
    for profile in PROFILES:
        table.add_row(profile, DDP.name, "no fault: nothing is reported")
    return table


def closing(
    outcomes: list[Outcome], clean: list[CleanRun], overhead: float | None, peers: Sequence[PeerOutcome] = ()
) -> dict[str, object]:
    """The values of the closing line."""
    slow = next((outcome for outcome in outcomes if outcome.name == STRAGGLER), None)
    measured = next((outcome.throughput for outcome in outcomes if outcome.name == REPLACED), None)
    return {
        "faults": [outcome.model_dump() for outcome in outcomes],
        "clean_runs": sum(not run.problem for run in clean),
        "false_alarms": sum(len(run.alarms) for run in clean),
        "false_repairs": sum(run.repairs for run in clean),
        "evidence_overhead_pct": overhead,
        "straggler_named_s": slow.detected_s if slow is not None and slow.culprit_ok else None,
        "peers": [outcome.model_dump() for outcome in peers],
        "throughput_after_pct": measured.after_pct if measured is not None else None,
    }


def main(
    only: Annotated[
        str, typer.Option(help="Names of faults and profiles, separated by commas, to try nothing else.")
    ] = "",
    clean: Annotated[bool, typer.Option("--clean", help="Try the profiles without a fault only.")] = False,
    clean_runs: Annotated[int, typer.Option(help="Runs without faults, of the profiles in turn.", min=0)] = len(
        PROFILES
    ),
    scale: Annotated[
        float, typer.Option(help="Factor for pauses, and for the times of stalls; 1: the defaults.")
    ] = 0.05,
    settle: Annotated[
        float, typer.Option(help="Minutes of steps before each fault: agents know them after about 9.", min=0)
    ] = 0.0,
    overhead_minutes: Annotated[float, typer.Option(help="For the cost of evidence; 0: not measured.", min=0)] = 1.0,
    peers: Annotated[bool, typer.Option("--peers", help="Try DLRover and NVRx, too, where they can be run.")] = False,
    peers_only: Annotated[bool, typer.Option("--peers-only", help="Try DLRover and NVRx, and not Perdure.")] = False,
    peer_seconds: Annotated[float, typer.Option(help="For which a peer is looked at after a fault.", min=10)] = 120.0,
    backend: Annotated[Backend, typer.Option(help="Where the jobs run.")] = Backend.LOCAL,
    out: Annotated[Path | None, typer.Option(help="Folder for the explanations.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List what can be tried, and try nothing.")] = False,
) -> None:
    """Injects known faults one at a time, and compares what jobs find and do with what must come out."""
    console = Console(highlight=False, soft_wrap=True, width=120)
    if show:
        console.print(listed())
        return
    due = Plan((), (), False) if peers_only else plan(only, clean=clean, clean_runs=clean_runs, backend=backend)
    folder = out or OUT / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    trained: list[CleanRun] = []

    async def try_rows(bench: Bench, *, placed: bool) -> None:
        for row in due.rows:
            if row.injection.placed is placed:
                bench.say(f"{row.name} on {row.program.name} ...")
                outcomes.append(await bench.fault(row))
                bench.say(f"{row.name}: {outcomes[-1].summary}")

    async def run() -> None:
        if not (due.rows or due.profiles):
            return
        async with (
            ray_site() if backend is Backend.RAY else nullcontext() as site,
            control_plane() as plane,
        ):
            bench = Bench(folder, plane, console, scale=scale, settle=60 * settle, site=site)
            await try_rows(bench, placed=False)
            for profile in due.profiles:
                trained.append(await bench.clean(profile))
                found = trained[-1].problem or "; ".join(trained[-1].alarms) or "no alarm"
                bench.say(f"without a fault, {profile}: {found}")
        if any(row.injection.placed for row in due.rows):
            with machines():
                async with control_plane(worker_module=PLACED_WORKER) as plane:
                    bench = Bench(folder, plane, console, scale=scale, settle=60 * settle)
                    await try_rows(bench, placed=True)

    asyncio.run(run())
    overhead = measure_overhead(overhead_minutes) if due.overhead and overhead_minutes else None
    compared: list[PeerOutcome] = []
    if peers or peers_only:
        names = [name for name in only.split(",") if name]
        compared = asyncio.run(peer_systems.try_peers(names, limit=peer_seconds, kept=folder))
        console.print(peer_systems.table(compared))
    console.print(matrix(outcomes))
    console.print(f"explanations: {folder}")
    print(json.dumps(closing(outcomes, trained, overhead, compared), separators=(",", ":")))


def measure_overhead(minutes: float) -> float:
    """The share of a step that the evidence takes in the ranks, in percent: blocks with and without it in one run."""
    command = [sys.executable, "-m", "benchmarks.step_times", "--minutes", f"{minutes}"]
    measured = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(measured.stdout.splitlines()[-1])["evidence_overhead_pct"]


if __name__ == "__main__":
    typer.run(main)
