"""Runs a trial of the recovery benchmark, which otherwise only people run, so that it keeps working."""

from pathlib import Path

import pytest

from benchmarks.recovery.floor import run_floor
from benchmarks.recovery.perdure_job import DEAF_WORKER, PerdureJob, control_plane, node_processes
from benchmarks.recovery.records import Scenario, SystemName
from benchmarks.recovery.trial import run_trial

pytestmark = pytest.mark.long("frameworks")


@pytest.mark.parametrize(("scenario", "worker_module"), [(Scenario.WORKER, ""), (Scenario.NODE_REPLACED, DEAF_WORKER)])
async def test_what_is_killed_is_made_up_for_and_the_time_is_accounted_for(
    tmp_path: Path, scenario: Scenario, worker_module: str
):
    async with control_plane(worker_module=worker_module) as plane:
        job = PerdureJob(scenario, tmp_path, plane)
        record = await run_trial(
            job,
            system=SystemName.PERDURE,
            scenario=scenario,
            number=1,
            folder=tmp_path,
            timeout_seconds=120,
        )
        assert record.error == ""
        assert record.recovered
        assert record.seconds is not None
        parts = record.composition
        assert parts.noticed is not None
        assert parts.decided is not None
        assert parts.commanded is not None
        assert 0 < parts.noticed <= parts.decided <= parts.commanded < record.seconds
        assert parts.stepped == pytest.approx(record.seconds)
        assert node_processes(f"{job.uid}/") == []


async def test_bare_processes_step_too(tmp_path: Path) -> None:
    record = await run_floor(Scenario.WORKER, number=1, folder=tmp_path)
    assert record.error == ""
    assert record.seconds is not None
