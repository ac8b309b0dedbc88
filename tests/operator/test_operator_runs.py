"""Tests of the operator's requests to Temporal, with the session's server and a job that a test plays."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowHandle
from temporalio.worker import Worker

from perdure.base import executions
from perdure.base.executions import find
from perdure.client.client import Client
from perdure.contract import JobPhase, JobStatus
from perdure.contract.names import TRAINING_JOB, uid_of
from perdure.contract.users import OBJECT_MEMO
from perdure.operator.resource import TrainingJobResource
from perdure.operator.runs import Runs
from tests.operator.known_jobs import running_job
from tests.support.waiting import eventually

Handle = WorkflowHandle[object, object]


@workflow.defn(name=TRAINING_JOB, sandboxed=False)
class PlayedJob:
    """A job that runs until it is terminated."""

    @workflow.run
    async def run(self) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.query
    def status(self, role: str | None = None) -> JobStatus:
        return running_job(uid=uid_of(workflow.info().first_execution_run_id), reason="it runs")


async def start(client: TemporalClient, name: str, object_uid: str) -> Handle:
    handle = await client.start_workflow(
        TRAINING_JOB, id=f"job/nlp/{name}", task_queue=name, memo={OBJECT_MEMO: object_uid} if object_uid else None
    )
    await handle.query("status")
    return handle


@pytest.mark.parametrize("is_taken", [False, True], ids=["latest", "name-taken"])
async def test_the_result_is_that_of_the_object_s_own_run_whatever_job_has_its_name(
    temporal_client: TemporalClient, job_name: str, is_taken: bool
):
    runs = Runs(Client(temporal=temporal_client))
    async with Worker(temporal_client, task_queue=job_name, workflows=[PlayedJob]):
        own = await start(temporal_client, job_name, "1")
        known = TrainingJobResource.model_validate(
            {
                "metadata": {"name": job_name, "namespace": "nlp", "uid": "1"},
                "status": {"runId": own.first_execution_run_id},
            }
        )
        await own.terminate(reason="the test ends it")
        other = await start(temporal_client, job_name, "") if is_taken else None
        latest = await runs.find(known)
        assert latest is not None
        assert (latest.open, latest.object_uid) == ((True, "") if other else (False, "1"))
        run = await runs.find_ended(known) if other else latest
        assert run is not None
        assert (run.first_run_id, run.object_uid, run.open) == (own.first_execution_run_id, "1", False)
        result, status = await runs.result(known, run)
        assert (result.phase, result.reason) == (JobPhase.CANCELLED, "the workflow was terminated: the test ends it")
        assert (status is None) is is_taken
        if other is not None:
            await other.terminate()
    unknown = known.model_copy(update={"status": known.status.model_copy(update={"run_id": NOT_THERE})})
    assert await runs.find_ended(unknown) is None


@workflow.defn(name=TRAINING_JOB, sandboxed=False)
class ContinuedJob:
    """A job that has continued as new once."""

    @workflow.run
    async def run(self, again: bool) -> None:
        if again:
            workflow.continue_as_new(False)
        await workflow.wait_condition(lambda: False)


async def test_a_job_whose_first_run_the_server_has_forgotten_is_found_where_another_one_has_its_name(
    temporal_client: TemporalClient, job_name: str, monkeypatch: pytest.MonkeyPatch
):
    """Each run is kept for the retention from its own end on, and a long job has many."""
    runs = Runs(Client(temporal=temporal_client))
    async with Worker(temporal_client, task_queue=job_name, workflows=[ContinuedJob]):
        workflow_id, memo = f"job/nlp/{job_name}", {OBJECT_MEMO: "1"}
        own = await temporal_client.start_workflow(TRAINING_JOB, True, id=workflow_id, task_queue=job_name, memo=memo)
        first = own.first_execution_run_id
        assert first is not None
        newest = temporal_client.get_workflow_handle(workflow_id)
        await eventually(lambda: _has_continued(newest, first))
        await newest.terminate(reason="the test ends it")
        other = await temporal_client.start_workflow(TRAINING_JOB, False, id=workflow_id, task_queue=job_name)

        async def find_of_later(client: TemporalClient, workflow: str, *, run_id: str = "", **options: Any) -> Any:
            # The server takes a quarter of a minute to forget a run.
            return None if run_id == first else await find(client, workflow, run_id=run_id, **options)

        monkeypatch.setattr(executions, "find", find_of_later)
        metadata = {"name": job_name, "namespace": "nlp", "uid": "1"}
        known = TrainingJobResource.model_validate({"metadata": metadata, "status": {"runId": first}})
        run = await eventually(lambda: runs.find_ended(known))
        assert (run.first_run_id, run.object_uid, run.open) == (first, "1", False)
        result, _ = await runs.result(known, run)
        assert result.reason == "the workflow was terminated: the test ends it"
        await other.terminate()


async def _has_continued(handle: WorkflowHandle[Any, Any], first: str) -> bool:
    return (await handle.describe()).run_id != first


NOT_THERE = "01900000-0000-7000-8000-000000000000"
