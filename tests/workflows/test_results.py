"""Tests of the results of jobs whose workflows ended in another run than the one that a client has looked at."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.service import RPCError, RPCStatusCode

from perdure.client.client import Client
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.joining import DirectJobConnection
from perdure.client.results import await_result
from perdure.contract import JobPhase, JobResult
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import continue_as_new, node, reset, running


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
    service = fleet.client.workflow_service
    read, describe = service.get_workflow_execution_history, service.describe_workflow_execution

    async def read_of_later(request: Any, **options: Any) -> Any:
        _refuse_first(request.execution.run_id)
        return await read(request, **options)

    async def describe_of_later(request: Any, **options: Any) -> Any:
        _refuse_first(request.execution.run_id)
        return await describe(request, **options)

    def _refuse_first(run_id: str) -> None:
        # The server takes a quarter of a minute to forget a run.
        if run_id == first:
            raise RPCError("workflow execution not found", RPCStatusCode.NOT_FOUND, b"")

    monkeypatch.setattr(service, "get_workflow_execution_history", read_of_later)
    monkeypatch.setattr(service, "describe_workflow_execution", describe_of_later)
    name = job.id.rpartition("/")[2]
    connection = DirectJobConnection(Client(temporal=fleet.client), name, "default")
    result = await connection.result_of_run(first)
    assert result is not None
    assert (result.phase, result.exit_code) == (JobPhase.SUCCEEDED, 0)
