"""`make bench-warm`: runs the trials, prints the tables, and ends with one line of JSON."""

from __future__ import annotations

import asyncio
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.recovery.__main__ import Bench, wanted_trials
from benchmarks.recovery.perdure_job import control_plane
from benchmarks.recovery.plan import PlannedTrial, forecast_seconds, plan
from benchmarks.recovery.processes import TrialFailed
from benchmarks.recovery.records import PEERS, Scenario, SystemName
from benchmarks.recovery.trial import SINGLE_FAULTS

from .report import markdown, print_report
from .scripts import ScriptTrial, run_script_trial, scripts
from .steady import StepTimes, measure_step_times

OUT = Path(__file__).with_name("out")
SYSTEMS = {SystemName.TORCHRUN, SystemName.DLROVER, SystemName.PERDURE}
QUICK_RUNS, QUICK_STEP_PAIRS = 1, 3


class WarmBench:
    """One run of the benchmark: kills at several sizes, kills in many kinds of scripts, and step times."""

    def __init__(self, folder: Path, *, timeout_seconds: float, console: Console) -> None:
        self.kills = Bench(folder, timeout_seconds=timeout_seconds, console=console)
        self._folder = folder
        self._console = console
        self._script_file = folder / "scripts.jsonl"
        self._step_file = folder / "steps.json"

    def script_trials(self) -> list[ScriptTrial]:
        if not self._script_file.exists():
            return []
        lines = self._script_file.read_text(encoding="utf-8").splitlines()
        return [ScriptTrial.model_validate_json(line) for line in lines]

    def step_times(self) -> StepTimes | None:
        if not self._step_file.exists():
            return None
        return StepTimes.model_validate_json(self._step_file.read_text(encoding="utf-8"))

    def time_steps(self, *, pairs: int, blocks: int) -> None:
        """Measures the step time, unless there is a result."""
        if pairs and self.step_times() is None:
            self.kills.say(f"step times: {pairs} pairs of a forked and a started rank that step alternately")
            times = measure_step_times(pairs=pairs, blocks=blocks)
            self._step_file.write_text(times.model_dump_json(), encoding="utf-8")

    async def kill_in_scripts(self, wanted: dict[str, int]) -> None:
        """Runs the remaining trials of scripts, alternating between kinds, and records each result at once."""
        done = self.script_trials()
        already = {script: sum(trial.script == script for trial in done) for script in wanted}
        left = [
            (number, script)
            for number in range(1, max(wanted.values(), default=0) + 1)
            for script, runs in wanted.items()
            if already[script] < number <= runs
        ]
        if not left:
            return
        async with control_plane() as plane:
            for position, (number, script) in enumerate(left, start=1):
                folder = self._folder / f"script-{script}-{number}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                trial = await run_script_trial(script, number=number, folder=folder, plane=plane)
                with self._script_file.open("a", encoding="utf-8") as file:
                    file.write(trial.model_dump_json() + "\n")
                outcome = f"{trial.seconds:.2f} s" if trial.seconds is not None else trial.error
                started = "warm" if trial.warm else "cold"
                self.kills.say(f"script {position}/{len(left)} {script} #{number}: {outcome}, {started}")

    def report(self) -> None:
        """Prints the tables, and writes them for the documentation."""
        results = (self.kills.results.read(), self.script_trials(), self.step_times(), self.kills.unavailable)
        tables = self._folder / "report.md"
        tables.write_text(markdown(*results), encoding="utf-8")
        self.kills.say(f"tables in {tables}")
        print_report(self._console, *results)


def main(
    runs: Annotated[int, typer.Option(help="Trials of Perdure per scenario and size.")] = 10,
    peer_runs: Annotated[int, typer.Option(help="Trials of each peer, and of cold starts, per scenario.")] = 3,
    script_runs: Annotated[int, typer.Option(help="Trials of each kind of script.")] = 10,
    step_pairs: Annotated[int, typer.Option(help="Pairs of a forked and a started rank to time steps in.")] = 15,
    step_blocks: Annotated[int, typer.Option(help="Blocks of steps that each of them runs.")] = 100,
    quick: Annotated[bool, typer.Option("--quick", help="One trial of each.")] = False,
    size: Annotated[list[int] | None, typer.Option(help="Nodes per job. [default: 2 and 4]")] = None,
    script: Annotated[list[str] | None, typer.Option(help="Run only these kinds of scripts. [default: all]")] = None,
    scenario: Annotated[list[Scenario] | None, typer.Option(help="Run only these scenarios. [default: all]")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without a step after which a trial has failed.")] = 120,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results. An interrupted run resumes from the results in it.")
    ] = None,
) -> None:
    """Kills ranks and nodes with warm starts, with cold starts, and under torchrun and DLRover; kills a rank in each
    kind of script; compares the step time of forked ranks with that of started ones."""
    if quick:
        runs, peer_runs, script_runs = (min(n, QUICK_RUNS) for n in (runs, peer_runs, script_runs))
        step_pairs = min(step_pairs, QUICK_STEP_PAIRS)
    folder = (out or OUT / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    bench = WarmBench(folder, timeout_seconds=timeout, console=Console(highlight=False))
    kinds = {kind: script_runs for kind in (script or scripts()) if script_runs}

    async def run() -> None:
        bench.time_steps(pairs=step_pairs, blocks=step_blocks)
        trials: list[PlannedTrial] = []
        if runs or peer_runs:
            await bench.kills.find_out_what_is_available(SYSTEMS if peer_runs else SYSTEMS - set(PEERS))
            wanted = wanted_trials(
                systems=SYSTEMS - bench.kills.unavailable.keys(),
                scenarios=scenario or list(SINGLE_FAULTS),
                runs=runs,
                peer_runs=peer_runs,
                lease_only_runs=0,
            )
            done = bench.kills.results.read()
            trials = [trial for nodes in size or [2, 4] for trial in plan(wanted, size=nodes, done=done)]
        minutes = forecast_seconds(trials) / 60
        bench.kills.say(
            f"{len(trials)} kills, about {minutes:.0f} min, then {sum(kinds.values())} of scripts; "
            f"to continue after an interruption: --out {folder}"
        )
        await bench.kills.run(trials, steady_seconds=0)
        await bench.kill_in_scripts(kinds)

    try:
        asyncio.run(run())
    except TrialFailed as failed:
        bench.kills.say(f"stopped: {failed}")
        raise typer.Exit(1) from failed
    bench.report()


if __name__ == "__main__":
    typer.run(main)
