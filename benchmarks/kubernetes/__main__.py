"""`make bench-kubernetes`: runs the remaining trials, prints the tables, and ends with one line of JSON."""

from __future__ import annotations

import asyncio
import shutil
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.history.__main__ import quieten
from benchmarks.recovery.processes import TrialFailed

from .faults import run_fault
from .records import FaultName, FaultTrial, ResultFile, Thousand
from .report import markdown, print_report
from .site import Site, site
from .thousand import measure_thousand

OUT = Path(__file__).with_name("out")
QUICK_LEASE_SECONDS = 30.0


class Bench:
    """One run of the benchmark."""

    def __init__(self, folder: Path, *, timeout_seconds: float, console: Console) -> None:
        self._folder = folder
        self._faults = ResultFile(folder / "faults.jsonl")
        self._thousands = ResultFile(folder / "thousand.jsonl")
        self._timeout_seconds = timeout_seconds
        self._console = console

    async def run(self, *, faults: list[FaultName], runs: int, large: int, nodes: int, lost: int, hold: float) -> None:
        """Runs the trials that have no result yet, and records each result at once."""
        done = self._faults.read(FaultTrial)
        already = {fault: sum(trial.fault is fault for trial in done) for fault in faults}
        # Machines drift: what is compared takes turns at being first.
        turns = [(number, faults if number % 2 else faults[::-1]) for number in range(1, runs + 1)]
        left = [(number, fault) for number, order in turns for fault in order if already[fault] < number <= runs]
        large -= len(self._thousands.read(Thousand))
        if not left and large <= 0:
            return
        running = asyncio.current_task()
        assert running
        # A thousand simulated machines must not stay in a cluster that others use.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        async with site(self.say) as where:
            for position, (number, fault) in enumerate(left, start=1):
                trial = await self._fault(where, fault, number)
                self._faults.append(trial)
                outcome = f"{trial.stepping:.2f} s" if trial.ok else trial.error or trial.title
                self.say(f"{position}/{len(left)} {fault} #{number}: {outcome}")
            await where.gateway.turn(on=False)
            for _ in range(large):
                self._thousands.append(
                    await measure_thousand(where, nodes=nodes, lost=lost, lease_seconds=hold, say=self.say)
                )

    async def _fault(self, where: Site, fault: FaultName, number: int) -> FaultTrial:
        folder = self._folder / f"{fault.name.lower()}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return await run_fault(where, fault, number=number, folder=folder, timeout_seconds=self._timeout_seconds)

    def report(self) -> None:
        """Prints the tables, and writes them for the documentation."""
        results = (self._faults.read(FaultTrial), self._thousands.read(Thousand))
        tables = self._folder / "report.md"
        tables.write_text(markdown(*results), encoding="utf-8")
        self.say(f"tables in {tables}")
        print_report(self._console, *results)

    def say(self, line: str) -> None:
        self._console.print(f"bench: {line}", markup=False, highlight=False, soft_wrap=True)


def main(
    runs: Annotated[int, typer.Option(help="Trials of each fault.")] = 5,
    large: Annotated[int, typer.Option(help="Number of large jobs, each measured beside a bare loop.")] = 3,
    nodes: Annotated[int, typer.Option(help="Nodes of a large job.")] = 1000,
    lost: Annotated[int, typer.Option(help="Nodes of a large job that are lost at once.")] = 30,
    hold: Annotated[float, typer.Option(help="Seconds for which a large job's leases are held.")] = 600,
    quick: Annotated[
        bool, typer.Option("--quick", help="One trial of each kind, and leases for half a minute.")
    ] = False,
    fault: Annotated[list[FaultName] | None, typer.Option(help="Run only these faults. [default: all]")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without a step after which a trial has failed.")] = 120,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results. An interrupted run resumes from the results in it.")
    ] = None,
) -> None:
    """Injects a cluster's faults into a job of two pods, and creates, disturbs and observes a job of a thousand."""
    if quick:
        runs, large, hold = min(runs, 1), min(large, 1), min(hold, QUICK_LEASE_SECONDS)
    quieten()
    folder = (out or OUT / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, timeout_seconds=timeout, console=Console(highlight=False))
    bench.say(f"to continue after an interruption: --out {folder}")
    try:
        asyncio.run(
            bench.run(faults=fault or list(FaultName), runs=runs, large=large, nodes=nodes, lost=lost, hold=hold)
        )
    except TrialFailed as failed:
        bench.say(f"stopped: {failed}")
        raise typer.Exit(1) from failed
    bench.report()


if __name__ == "__main__":
    typer.run(main)
