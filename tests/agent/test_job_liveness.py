"""Tests of the liveness query for jobs whose names were reset, used again, or are unknown."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import Client
from temporalio.worker import Worker

from perdure.agent.job_liveness import JobLiveness, query_job_liveness
from tests.agent.recorder import Recorder


def run_id_of_a_start(time: datetime) -> str:
    """A UUID of version 7, as Temporal's servers give runs."""
    milliseconds = int(time.timestamp() * 1000)
    return str(UUID(int=milliseconds << 80 | 0x7 << 76 | 0x2 << 62 | secrets.randbits(62)))


async def test_the_first_run_id_outlives_resets_and_tells_names_used_again_apart(temporal_client: Client) -> None:
    name, queue = f"job/tests/{secrets.token_hex(4)}", f"recorder-{secrets.token_hex(4)}"

    async def fate(first_run_id: str | None) -> JobLiveness:
        assert first_run_id
        return await query_job_liveness(
            temporal_client, job_id=name, first_run_id=first_run_id, rpc_timeout=timedelta(seconds=10)
        )

    async def reset() -> None:
        await temporal_client.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=temporal_client.namespace,
                workflow_execution=WorkflowExecution(workflow_id=name),
                workflow_task_finish_event_id=4,
                request_id=secrets.token_hex(4),
            )
        )

    assert await fate("unknown") is JobLiveness.NOT_FOUND
    async with Worker(temporal_client, task_queue=queue, workflows=[Recorder]):
        job = await temporal_client.start_workflow(Recorder.run, id=name, task_queue=queue)
        ours = job.first_execution_run_id
        assert await job.query(Recorder.seen) == []
        assert await fate(ours) is JobLiveness.OPEN
        await reset()
        assert await fate(ours) is JobLiveness.OPEN
        await temporal_client.get_workflow_handle(name).terminate()
        assert await fate(ours) is JobLiveness.CLOSED
        await reset()
        assert await fate(ours) is JobLiveness.OPEN
        await temporal_client.get_workflow_handle(name).terminate()
        another_began = datetime.now(UTC)
        another = await temporal_client.start_workflow(Recorder.run, id=name, task_queue=queue)
        assert await fate(ours) is JobLiveness.CLOSED
        assert await fate(another.first_execution_run_id) is JobLiveness.OPEN
        # The server has forgotten our run: the name was used again since.
        assert await fate(run_id_of_a_start(another_began - timedelta(days=30))) is JobLiveness.CLOSED
        # A database restored from before our start does not know our run.
        assert await fate(run_id_of_a_start(another_began + timedelta(days=30))) is JobLiveness.NOT_FOUND
        # Servers before run IDs had a clock tell neither.
        assert await fate(str(uuid4())) is JobLiveness.NOT_FOUND
        await temporal_client.get_workflow_handle(name).terminate()
