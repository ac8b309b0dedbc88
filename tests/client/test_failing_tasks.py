"""Tests of a worker that cannot continue a job: every view names the failing workflow task and its cause."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from temporalio import workflow
from temporalio.client import Client as TemporalClient
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.base.errors import NoWorker, WorkflowTaskFails
from perdure.base.metrics.sdk import worker_runtime
from perdure.cli.checks import Verdict, check_workflow_tasks
from perdure.cli.inspect import _describe_task_failures, _jobs_table
from perdure.client.client import Client
from perdure.client.views import JobSummary
from perdure.workflows.node_group import NodeGroup
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually
from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import running


@workflow.defn(name="TrainingJob")
class OtherJob:
    """A workflow whose commands for the same events differ."""

    @workflow.run
    async def run(self, spec: dict[str, object]) -> None:
        await workflow.sleep(timedelta(hours=1))

    @workflow.signal
    def failure(self, message: dict[str, object]) -> None:
        """Makes a workflow task."""


@pytest.fixture
async def own_client(temporal_server: DevServer) -> TemporalClient:
    """A connection whose log lines go where those of a worker go."""
    return await TemporalClient.connect(
        temporal_server.address,
        data_converter=pydantic_data_converter,
        runtime=worker_runtime(with_metrics=False).runtime,
    )


async def test_a_failing_workflow_task_is_named_with_its_cause(
    own_client: TemporalClient, caplog: pytest.LogCaptureFixture
):
    client = Client(temporal=own_client)
    async with running_fleet(own_client) as fleet:
        job = await submit(fleet, job_spec("1"))
        name = job.id.rpartition("/")[2]
        await running(job, nodes=1)

        async def listed() -> JobSummary | None:
            return next((one for one in await client.list(limit=500) if one.name == name), None)

        # The server lists what it knows a moment later.
        assert (await eventually(listed)).task_failure is None
        assert await client.task_failures(name) == ()
    with caplog.at_level(logging.WARNING):
        async with Worker(
            own_client,
            task_queue=fleet.task_queue,
            workflows=[OtherJob, NodeGroup],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ):
            await job.signal("failure", {})

            async def failing() -> JobSummary | None:
                job = await listed()
                return job if job and job.task_failure else None

            found = await eventually(failing)
            failure = found.task_failure
            assert failure is not None
            assert failure.nondeterminism
            assert failure.attempt > 1
            assert failure.worker
            # The SDK's core hands its log lines over from time to time.
            await eventually(lambda: "failing workflow task" in caplog.text.lower())
            with pytest.raises(WorkflowTaskFails, match=r"its workflow task fails by .*ondeterminism") as fails:
                await client.status(name)
            assert "of that release or a newer one" in fails.value.remedy
            failed = [check async for check in check_workflow_tasks(own_client) if check.verdict is Verdict.FAILED]
            assert any(job.id in check.detail and "ondeterminism" in check.detail for check in failed)
            assert any("(fails)" in row[1] for row in _jobs_table([found], everywhere=False).rows)
            assert job.id in _describe_task_failures((failure,))[0]
    await job.terminate()
    assert job.id not in str([check.detail async for check in check_workflow_tasks(own_client)])


async def test_no_worker_is_not_a_failing_task(temporal_client: TemporalClient):
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("1"))
        await running(job, nodes=1)
    name = job.id.rpartition("/")[2]
    with pytest.raises(NoWorker, match="no worker answers") as unanswered:
        await Client(temporal=temporal_client).status(name)
    assert not isinstance(unanswered.value, WorkflowTaskFails)
    await job.terminate()
