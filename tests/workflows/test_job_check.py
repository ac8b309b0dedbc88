"""Tests that a job's specification is checked once, by an activity of its first run, and never by a replay."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib.metadata import version
from typing import Any
from uuid import uuid4

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowFailureError,
    WorkflowHistory,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
)
from temporalio.common import WorkflowIDConflictPolicy

from perdure.contract import Accepted, ScaleRequest
from tests.histories.recorded import RECORDED, read
from tests.support.replays import replay
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import node, running, status


def refused_by_this_release(history: WorkflowHistory) -> WorkflowHistory:
    """The same history of a job whose specification says what this release allows no more."""

    def with_gone_field(value: Any) -> Any:
        if isinstance(value, list):
            return [with_gone_field(item) for item in value]
        if not isinstance(value, dict):
            return value
        changed = {key: with_gone_field(item) for key, item in value.items()}
        return changed | {"a_field_that_is_gone": 1} if "roles" in changed else changed

    payloads = history.events[0].workflow_execution_started_event_attributes.input.payloads
    before = [payload.data for payload in payloads]
    for payload in payloads:
        payload.data = json.dumps(with_gone_field(json.loads(payload.data))).encode()
    assert [payload.data for payload in payloads] != before
    return history


@pytest.mark.parametrize("name", ["is_scaled.job-1", "is_scaled.job-2", "is_scaled.group-1", "is_scaled.group-2"])
async def test_a_job_of_an_earlier_release_goes_on_though_this_one_would_refuse_it(name: str):
    await replay(refused_by_this_release(read(RECORDED / version("perdure") / f"{name}.json.gz")))


async def test_a_job_goes_on_though_the_next_release_would_refuse_it_and_signals_its_group_through_the_client(
    temporal_client: Client,
):
    """A signal by command makes the server lock sender and receiver, and half of all repairs lost 0.5 s by that."""
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("1"))
        known = await running(job, nodes=1)
        await (await node(fleet, job, 0)).rank_dies()
        await running(job, nodes=1, generation=2)
        for workflow_id in (job.id, *known.groups):
            history = await temporal_client.get_workflow_handle(workflow_id).fetch_history()
            kinds = {event.event_type for event in history.events}
            assert EventType.EVENT_TYPE_SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED not in kinds, workflow_id
            await replay(refused_by_this_release(history))
        await job.cancel()


WRONG_SPECS = pytest.mark.parametrize(
    ("spec", "says"),
    [
        (job_spec("2", retry={"max_restarts": -1}), "retry.max_restarts: got -1"),
        (job_spec("2", roles={}), "expected one role"),
    ],
)


@WRONG_SPECS
async def test_a_wrong_specification_ends_the_job_once_with_its_text(
    temporal_client: Client, spec: dict[str, Any], says: str
):
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, spec | {"name": f"t-{uuid4().hex[:8]}"})
        with pytest.raises(WorkflowFailureError) as failed:
            await job.result()
        assert says in str(failed.value.cause)
        with pytest.raises(WorkflowQueryFailedError, match=says):
            await status(job)
        assert not fleet.nodes
        await replay(await job.fetch_history())


async def test_a_request_that_comes_with_the_job_counts(temporal_client: Client):
    async with running_fleet(temporal_client) as fleet:
        start = started_with(fleet, job_spec("1"))
        request = ScaleRequest(nodes="2")
        accepted = await temporal_client.execute_update_with_start_workflow(
            "scale", request, start_workflow_operation=start, result_type=Accepted
        )
        job = await start.workflow_handle()
        assert "changes to 2 nodes" in accepted.message
        await running(job, nodes=2)
        await replay(await job.fetch_history())
        await job.cancel()


@WRONG_SPECS
async def test_a_request_that_comes_with_a_wrong_job_makes_no_node(
    temporal_client: Client, spec: dict[str, Any], says: str
):
    async with running_fleet(temporal_client) as fleet:
        start = started_with(fleet, spec | {"name": f"t-{uuid4().hex[:8]}"})
        request = ScaleRequest(nodes="3")
        with suppress(WorkflowUpdateFailedError):
            await temporal_client.execute_update_with_start_workflow(
                "scale", request, start_workflow_operation=start, result_type=Accepted
            )
        job = await start.workflow_handle()
        with pytest.raises(WorkflowFailureError) as failed:
            await job.result()
        assert says in str(failed.value.cause)
        assert not fleet.nodes


def started_with(fleet: Fleet, spec: dict[str, Any]) -> WithStartWorkflowOperation[Any, Any]:
    return WithStartWorkflowOperation(
        "TrainingJob",
        spec,
        id=f"job/default/{spec['name']}",
        task_queue=fleet.task_queue,
        id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
    )
