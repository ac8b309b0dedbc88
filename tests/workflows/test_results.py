"""Tests of the results of jobs whose workflows ended in another run than the one that a client has looked at."""

from __future__ import annotations

import pytest
from temporalio.exceptions import ApplicationError

from perdure.activities.archive import read_job
from perdure.client.client import Client
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.joining import DirectJobConnection
from perdure.client.results import await_result
from perdure.contract import ArchivedJob, ArchiveRequest, JobPhase, JobResult
from perdure.contract.names import uid_of
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import continue_as_new, forget_run, node, reset, running


async def test_who_waits_for_a_job_waits_for_its_end_after_a_reset(fleet: Fleet):
    job = fleet.client.get_workflow_handle((await submit(fleet, job_spec("1"))).id, result_type=JobResult)
    await running(job, nodes=1)
    before = fleet.client.get_workflow_handle(job.id, run_id=(await job.describe()).run_id, result_type=JobResult)
    await reset(job)
    await running(job, nodes=1)
    await (await node(fleet, job, 0)).finish()
    result = await await_result(fleet.client, before, rpc_timeout=CALL_TIMEOUT)
    assert (result.phase, result.exit_code) == (JobPhase.SUCCEEDED, 0)


async def test_a_job_that_is_terminated_after_a_reset_was_terminated(fleet: Fleet):
    job = fleet.client.get_workflow_handle((await submit(fleet, job_spec("1"))).id, result_type=JobResult)
    await running(job, nodes=1)
    before = fleet.client.get_workflow_handle(job.id, run_id=(await job.describe()).run_id, result_type=JobResult)
    await reset(job)
    await job.terminate(reason="for good")
    result = await await_result(fleet.client, before, rpc_timeout=CALL_TIMEOUT)
    assert result.phase is JobPhase.CANCELLED


@pytest.mark.parametrize("is_forgotten", [True, False], ids=["forgotten", "known"])
async def test_a_job_is_archived_as_it_ended_although_another_one_has_its_name_by_now(
    fleet_of_short_runs: Fleet, monkeypatch: pytest.MonkeyPatch, *, is_forgotten: bool
):
    fleet, spec = fleet_of_short_runs, job_spec("1")
    job = fleet.client.get_workflow_handle((await submit(fleet, spec)).id)
    await running(job, nodes=1)
    first = (await job.describe()).raw_description.workflow_execution_info.first_run_id
    await continue_as_new(job)
    await (await node(fleet, job, 0)).finish()
    await job.result()
    other = await submit(fleet, spec)
    if is_forgotten:
        forget_run(monkeypatch, fleet.client, first)
    request = {"namespace": "default", "name": spec["name"], "uid": uid_of(first), "first_run_id": first}

    async def record() -> ArchivedJob | None:
        try:
            return await read_job(fleet.client, ArchiveRequest(**request, url="file:///here", is_final=True))
        except ApplicationError:
            return None  # Lists show an end later than it happened.

    found = await eventually(record)
    assert (found.uid, found.phase) == (uid_of(first), JobPhase.SUCCEEDED)
    await other.terminate()


async def test_a_machine_learns_the_result_of_a_job_whose_first_run_the_server_has_forgotten(
    fleet_of_short_runs: Fleet, monkeypatch: pytest.MonkeyPatch
):
    fleet = fleet_of_short_runs
    job = fleet.client.get_workflow_handle((await submit(fleet, job_spec("1"))).id)
    await running(job, nodes=1)
    first = (await job.describe()).raw_description.workflow_execution_info.first_run_id
    await continue_as_new(job)
    await (await node(fleet, job, 0)).finish()
    await job.result()
    forget_run(monkeypatch, fleet.client, first)
    name = job.id.rpartition("/")[2]
    connection = DirectJobConnection(Client(temporal=fleet.client), name, "default")
    result = await connection.result_of_run(first)
    assert result is not None
    assert (result.phase, result.exit_code) == (JobPhase.SUCCEEDED, 0)
