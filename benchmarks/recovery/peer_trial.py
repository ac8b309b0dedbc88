"""Runs one trial of a peer as a process, so that it can have its own PID namespace. Prints the record as JSON."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pydantic import BaseModel

from .peers import DLRoverJob, PeerJob, TorchrunJob
from .processes import in_pid_namespace
from .records import Scenario, SystemName, TrialRecord
from .trial import START_TIMEOUT, run_trial

OVERHEAD_SECONDS = 60.0
"""Seconds beyond starting and recovering after which a trial is given up."""


class PeerTrial(BaseModel):
    """The single argument of this program, as JSON."""

    system: SystemName
    scenario: Scenario
    number: int
    folder: Path
    size: int = 2
    timeout_seconds: float
    dlrover: Path = Path()
    """The `bin` folder of DLRover's environment."""

    def job(self) -> PeerJob:
        if self.system is SystemName.DLROVER:
            return DLRoverJob(self.scenario, self.folder, self.size, binaries=self.dlrover)
        own_store = self.system is SystemName.TORCHRUN_OWN_STORE
        return TorchrunJob(self.scenario, self.folder, self.size, own_store=own_store)


async def run_isolated(trial: PeerTrial) -> TrialRecord:
    """Runs a trial in a PID namespace of its own, so that no process of the peer remains."""
    command = [sys.executable, "-m", __spec__.name, trial.model_dump_json()]
    failed = TrialRecord(
        system=trial.system, scenario=trial.scenario, number=trial.number, size=trial.size, recovered=False
    )
    with (trial.folder / "harness.log").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *in_pid_namespace(command), stdout=asyncio.subprocess.PIPE, stderr=errors
        )
        try:
            output, _ = await asyncio.wait_for(
                process.communicate(), START_TIMEOUT + trial.timeout_seconds + OVERHEAD_SECONDS
            )
        except TimeoutError:
            return failed.model_copy(update={"error": "the trial itself hung"})
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    lines = output.decode().strip().splitlines()
    if process.returncode != 0 or not lines:
        return failed.model_copy(update={"error": f"the trial itself failed: see {errors.name}"})
    return TrialRecord.model_validate_json(lines[-1])


def main() -> None:
    trial = PeerTrial.model_validate_json(sys.argv[1])
    record = asyncio.run(
        run_trial(
            trial.job(),
            system=trial.system,
            scenario=trial.scenario,
            number=trial.number,
            folder=trial.folder,
            timeout_seconds=trial.timeout_seconds,
        )
    )
    print(record.model_dump_json())


if __name__ == "__main__":
    main()
