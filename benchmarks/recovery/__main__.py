"""`make bench-recovery`: runs the trials, prints the tables, and ends with one line of JSON."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .dlrover_environment import NotAvailable
from .dlrover_environment import ensure as ensure_dlrover
from .floor import run_floor
from .peer_trial import PeerTrial, run_isolated
from .perdure_job import DEAF_WORKER, ControlPlane, PerdureJob, control_plane
from .plan import USUAL_SECONDS, PlannedTrial, forecast_seconds, plan
from .processes import TrialFailed, pid_namespaces_work
from .records import PEERS, ResultFile, Scenario, SystemName, TrialRecord
from .report import markdown, print_report
from .steady import measure_steady
from .summary import Steady
from .trial import run_trial

OUT = Path(__file__).with_name("out")
QUICK_RUNS = 1


class Bench:
    """One run of the benchmark."""

    def __init__(self, folder: Path, *, timeout_seconds: float, console: Console) -> None:
        self.folder = folder
        self.results = ResultFile(folder / "results.jsonl")
        self.steady_file = folder / "steady.json"
        self.timeout_seconds = timeout_seconds
        self.console = console
        self.unavailable: dict[SystemName, str] = {}
        self._dlrover = Path()
        self._planes: dict[bool, ControlPlane] = {}
        """Control planes by whether they withhold evidence."""

    async def find_out_what_is_available(self, systems: set[SystemName]) -> None:
        """Prepares the peers, or records why one is unavailable."""
        if systems & set(PEERS) and not await pid_namespaces_work():
            for system in systems & set(PEERS):
                self.unavailable[system] = "needs a PID namespace: `unshare --pid` is refused here"
        elif SystemName.DLROVER in systems:
            self.say("preparing DLRover (a minute or two the first time)")
            try:
                self._dlrover = await ensure_dlrover()
            except NotAvailable as reason:
                self.unavailable[SystemName.DLROVER] = str(reason)

    async def run(self, trials: list[PlannedTrial], *, steady_seconds: float) -> None:
        """Runs the trials, and records each result at once."""
        async with AsyncExitStack() as stack:
            if steady_seconds and not self.steady_file.exists():
                self.say(f"idle cost: one undisturbed job for {steady_seconds:.0f} s")
                plane = await self._plane(SystemName.PERDURE, stack)
                steady = await measure_steady(plane, seconds=steady_seconds)
                self.steady_file.write_text(steady.model_dump_json(indent=2) + "\n", encoding="utf-8")
            left = forecast_seconds(trials)
            for number, trial in enumerate(trials, start=1):
                folder = self.folder / f"{trial.system.name.lower()}-{trial.scenario}{trial.size}-{trial.number}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                began = time.monotonic()
                record = await self._trial(trial, folder, stack)
                self.results.append(record)
                left -= forecast_seconds([trial])
                outcome = f"{record.seconds:.2f} s" if record.seconds is not None else record.error
                self.say(
                    f"{number}/{len(trials)} {trial.system} {trial.scenario.title} #{trial.number}: {outcome}"
                    f"   (trial {time.monotonic() - began:.0f} s, about {left / 60:.0f} min left)"
                )

    async def _trial(self, trial: PlannedTrial, folder: Path, stack: AsyncExitStack) -> TrialRecord:
        if trial.system in PEERS:
            return await run_isolated(
                PeerTrial(
                    system=trial.system,
                    scenario=trial.scenario,
                    number=trial.number,
                    folder=folder,
                    size=trial.size,
                    timeout_seconds=self.timeout_seconds,
                    dlrover=self._dlrover,
                )
            )
        if trial.system is SystemName.FLOOR:
            return await run_floor(trial.scenario, number=trial.number, nodes=trial.size, folder=folder)
        warm = trial.system is not SystemName.PERDURE_COLD
        return await run_trial(
            PerdureJob(trial.scenario, folder, await self._plane(trial.system, stack), trial.size, warm_starts=warm),
            system=trial.system,
            scenario=trial.scenario,
            number=trial.number,
            folder=folder,
            timeout_seconds=self.timeout_seconds,
        )

    async def _plane(self, system: SystemName, stack: AsyncExitStack) -> ControlPlane:
        """Returns the control plane for a system's trials; starts it for the first of them."""
        withhold = system is SystemName.PERDURE_WITHHELD
        if withhold not in self._planes:
            plane = control_plane(worker_module=DEAF_WORKER if withhold else "")
            self._planes[withhold] = await stack.enter_async_context(plane)
        return self._planes[withhold]

    def report(self) -> None:
        """Prints the tables, and writes them for the documentation."""
        text = self.steady_file.read_text(encoding="utf-8") if self.steady_file.exists() else None
        steady = Steady.model_validate_json(text) if text else None
        records = self.results.read()
        tables = self.folder / "report.md"
        tables.write_text(markdown(records, steady, self.unavailable), encoding="utf-8")
        self.say(f"tables in {tables}")
        print_report(self.console, records, steady, self.unavailable)

    def say(self, line: str) -> None:
        self.console.print(f"bench: {line}", markup=False, highlight=False, soft_wrap=True)


def wanted_trials(
    *, systems: set[SystemName], scenarios: list[Scenario], runs: int, peer_runs: int, lease_only_runs: int
) -> dict[tuple[SystemName, Scenario], int]:
    """Returns the number of trials of each kind."""
    wanted = {(peer, scenario): peer_runs for peer in PEERS if peer in systems for scenario in scenarios}
    if SystemName.PERDURE in systems:
        wanted |= {(SystemName.PERDURE, scenario): runs for scenario in scenarios}
        wanted |= {(SystemName.PERDURE_COLD, scenario): peer_runs for scenario in scenarios}
        wanted |= {(SystemName.FLOOR, scenario): peer_runs for scenario in scenarios}
        wanted[SystemName.PERDURE_WITHHELD, Scenario.NODE_REPLACED] = lease_only_runs
    return {
        (system, scenario): count
        for (system, scenario), count in wanted.items()
        if scenario in USUAL_SECONDS.get(system, {})
    }


def main(
    runs: Annotated[int, typer.Option(help="Trials of Perdure per scenario.")] = 20,
    peer_runs: Annotated[int, typer.Option(help="Trials of each peer, and of cold starts, per scenario.")] = 5,
    lease_only_runs: Annotated[int, typer.Option(help="Trials of Perdure with the backend's evidence withheld.")] = 5,
    trials_a: Annotated[
        int, typer.Option(help="Run only this many trials of Perdure in (a), for its spread; 0 for everything.")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="One trial of each.")] = False,
    system: Annotated[
        list[SystemName] | None, typer.Option(help="Run only these systems; default: torchrun, DLRover and Perdure.")
    ] = None,
    scenario: Annotated[list[Scenario] | None, typer.Option(help="Run only these scenarios.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without a step after which a trial has failed.")] = 120,
    steady: Annotated[float, typer.Option(help="Seconds for which the idle cost is measured; 0 to skip that.")] = 30,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results. An interrupted run resumes from the results in it.")
    ] = None,
) -> None:
    """Kills workers and nodes under torchrun, DLRover and Perdure, and compares how soon training continues."""
    if quick:
        runs, peer_runs, lease_only_runs = (min(n, QUICK_RUNS) for n in (runs, peer_runs, lease_only_runs))
    if trials_a:
        system, steady = [SystemName.PERDURE], 0
    systems = set(system or (SystemName.TORCHRUN, SystemName.DLROVER, SystemName.PERDURE))
    folder = (out or OUT / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, timeout_seconds=timeout, console=Console(highlight=False))

    async def run() -> None:
        await bench.find_out_what_is_available(systems)
        wanted = wanted_trials(
            systems=systems - bench.unavailable.keys(),
            scenarios=scenario or list(Scenario),
            runs=runs,
            peer_runs=peer_runs,
            lease_only_runs=lease_only_runs,
        )
        if trials_a:
            wanted = {(SystemName.PERDURE, Scenario.WORKER): trials_a}
        trials = plan(wanted, done=bench.results.read())
        minutes = forecast_seconds(trials) / 60
        bench.say(f"{len(trials)} trials, about {minutes:.0f} min; to continue after an interruption: --out {folder}")
        await bench.run(trials, steady_seconds=steady if SystemName.PERDURE in systems else 0)

    try:
        asyncio.run(run())
    except TrialFailed as failed:
        bench.say(f"stopped: {failed}")
        raise typer.Exit(1) from failed
    bench.report()


if __name__ == "__main__":
    typer.run(main)
