"""Trainings of real ranks whose loss becomes NaN: once, at one step always, and in a report only."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, JobPhase, RestoreSource
from tests.support.allocation import REPOSITORY
from tests.system.made_steps import steps
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("bad_losses.py")
STEPS = 60


async def submit(
    site: Site, *arguments: str, on_nan: str, program: str = "torchrun", script: Path = SCRIPT, **spec: Any
) -> Job:
    out = site.folder / f"bad-{on_nan}-{len(site.jobs)}"
    out.mkdir()
    command = [program, str(script), str(out), *arguments]
    job = await site.submit(command=command, recovery={"on_nan": on_nan}, **spec)
    job.out = out
    return job


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(400)
async def test_a_gradient_that_is_spoiled_once_costs_the_steps_since_and_changes_no_parameter(
    site: Site, tmp_path: Path
):
    undisturbed = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    run = [*undisturbed, str(tmp_path), "--pause", "0"]
    await asyncio.to_thread(subprocess.run, run, cwd=REPOSITORY, check=True, timeout=PATIENCE, capture_output=True)
    job = await submit(site, "--spoil-at", "20", on_nan="rollback")
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, result
    [incident] = await job.incidents()
    assert incident.failure is FailureClass.NUMERIC
    assert " is nan at step 21; numbers: samples " in incident.title
    assert (incident.restored_step, incident.restored_from) == (19, RestoreSource.MEMORY)
    for rank in (0, 1):
        made = steps(job, rank)
        assert sorted(set(made)) == list(range(1, STEPS + 1))
        assert made.count(19) == 1
        assert made.count(20) == 2
    assert (job.out / "digest").read_text() == (tmp_path / "digest").read_text()
    told = explanation(incident, job=job.name, flag="").plain
    assert "load a state of step 19 or before" in told
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(400)
async def test_a_job_whose_memory_is_lost_goes_back_to_a_sound_state_in_storage(site: Site, tmp_path: Path):
    storage = {"storage": f"file://{tmp_path / 'storage'}", "every": 4}
    job = await submit(site, "--spoil-at", "40", "--forget", "--pause", "0.2", on_nan="rollback", checkpoint=storage)
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, result
    [incident] = await job.incidents()
    assert incident.failure is FailureClass.NUMERIC
    assert incident.restored_from is RestoreSource.STORAGE
    restored = incident.restored_step
    assert restored is not None
    assert 0 < restored < 40
    made = steps(job, 0)
    assert sorted(set(made)) == list(range(1, STEPS + 1))
    assert (made.count(restored), made.count(restored + 1)) == (1, 2)


@pytest.mark.long("silent-faults")
async def test_a_script_without_torchrun_goes_back_as_well(site: Site):
    job = await submit(site, "--spoil-at", "20", on_nan="rollback", program=sys.executable)
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, result
    [incident] = await job.incidents()
    assert (incident.failure, incident.restored_step) == (FailureClass.NUMERIC, 19)
    assert sorted(set(steps(job, 0))) == list(range(1, STEPS + 1))


@pytest.mark.long("silent-faults")
async def test_a_gradient_that_is_spoiled_each_time_stops_the_job_with_its_step(site: Site):
    job = await submit(site, "--spoil-at", "20", "--always", on_nan="rollback")
    result = await job.client.wait(job.name)
    assert (result.phase, result.exit_code) == (JobPhase.FAILED, 1)
    assert "is nan at step 21" in result.reason
    assert "it was no number at step 21 before the job went back" in result.reason
    assert [one.failure for one in await job.incidents()] == [FailureClass.NUMERIC] * 2


@pytest.mark.long("silent-faults")
async def test_a_rank_that_reports_nan_once_is_shown_and_nothing_is_repaired(site: Site):
    job = await submit(site, "--misreport-at", "20", on_nan="report")
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    [entry] = await job.incidents()
    assert entry.observation is not None
    assert entry.title == "the loss of rank 1 is nan at step 20; training continued"
    assert [sign.rank for sign in entry.evidence] == [1]
    assert steps(job, 1) == list(range(1, STEPS + 1))


@pytest.mark.long("silent-faults")
async def test_a_job_that_is_to_stop_names_rank_and_step(site: Site):
    job = await submit(site, "--spoil-at", "20", on_nan="stop")
    result = await job.client.wait(job.name)
    assert (result.phase, result.exit_code) == (JobPhase.FAILED, 1)
    assert "is nan at step 21" in result.reason
    assert "recovery.on_nan is stop" in result.reason


@pytest.mark.long("silent-faults")
@pytest.mark.timeout(400)
async def test_a_trainer_of_hugging_face_whose_loss_is_once_no_number_goes_back(site: Site):
    script = Path(__file__).with_name("trainer_with_nan.py")
    job = await submit(site, on_nan="rollback", script=script)
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED, result
    [incident] = await job.incidents()
    assert incident.failure is FailureClass.NUMERIC
    assert " is nan at step 20" in incident.title
    assert (incident.restored_step, incident.restored_from) == (18, RestoreSource.MEMORY)
    for rank in (0, 1):
        made = steps(job, rank)
        assert sorted(set(made)) == list(range(1, 41))
        assert made.count(19) == 2
