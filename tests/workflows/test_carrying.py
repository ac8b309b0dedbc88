"""Tests that the state carried into the next run stays below the server's limit and unchanged."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from temporalio import activity
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.activities.site import SiteActivities
from perdure.contract import GroupDesire, GroupTransitions, NodesQuery, NodeView, SiteFacts
from perdure.spec.roles import MAX_NODES
from perdure.workflows import options
from perdure.workflows.carrying import LARGEST_PLAIN, Packed, pack, unpack
from perdure.workflows.delivery import SIGNAL_ACTIVITIES, Delivery
from perdure.workflows.policy.record.incident_texts import within_budget
from perdure.workflows.policy.state.job import JobState
from perdure.workflows.training_job import TrainingJob
from tests.workflows.fleet import job_spec
from tests.workflows.jobs import continued_as_new, incidents, status
from tests.workflows.large import large_state, long_incident

INCIDENTS = 50


@activity.defn(name=SIGNAL_ACTIVITIES["desire"])
async def take_desire(group_id: str, message: GroupDesire) -> Delivery:
    """A group that has what is desired already."""
    return Delivery.TAKEN


async def start(client: Client, task_queue: str, carried: Any) -> WorkflowHandle[Any, Any]:
    """A job that continues from what another run carried."""
    spec = job_spec(str(MAX_NODES))
    job = await client.start_workflow(
        "TrainingJob", args=[spec, carried], id=f"job/default/{spec['name']}", task_queue=task_queue
    )
    return client.get_workflow_handle(job.id)


async def continued(job: WorkflowHandle[Any, Any]) -> None:
    """Has the job look whether it should continue as new, and returns when it has."""
    first_run = (await job.describe()).run_id
    await job.signal("transitions", GroupTransitions(uid="of another job", group=0, sequence=1))
    await continued_as_new(job, first_run)


@pytest.mark.parametrize("nodes", [MAX_NODES, pytest.param(5_000, marks=pytest.mark.long("workflows"))])
async def test_a_large_job_with_long_incidents_continues_as_new_and_knows_the_same(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch, nodes: int
):
    told = within_budget(tuple(long_incident(number + 1) for number in range(INCIDENTS)))
    # As the job itself gives it when it decides for the first time.
    reason = f"{nodes:,} of {nodes:,} nodes, {8 * nodes:,} ranks"
    large = large_state(nodes).replace(incidents=told, incident_count=INCIDENTS)
    large = large.with_role(large.roles["worker"].replace(reason=reason))
    facts = SiteActivities(SiteFacts(search_attributes=False, backends=("local",)))
    client, queue = temporal_client, f"perdure-{uuid4().hex[:8]}"
    async with Worker(
        client,
        task_queue=queue,
        workflow_runner=UnsandboxedWorkflowRunner(),
        workflows=[TrainingJob],
        activities=[*facts.all, take_desire],
    ):
        job = await start(client, queue, pack(large))
        before = await status(job)
        monkeypatch.setattr(options, "HISTORY_LIMIT", 40)
        await continued(job)
        monkeypatch.undo()
        after = await status(job)
        assert after.model_dump() == before.model_dump()
        assert after.nodes == nodes
        assert [one.number for one in await incidents(job)] == list(range(1, INCIDENTS + 1))
        views = [view for group in range(len(after.groups)) for view in await views_of(job, group)]
        assert [view.rank for view in views] == list(range(nodes))


async def views_of(job: WorkflowHandle[Any, Any], group: int) -> list[NodeView]:
    return await job.query("nodes", NodesQuery(group=group), result_type=list[NodeView])


def carried(message: JobState) -> bytes:
    """Returns the bytes that the server receives."""
    return pack(message).model_dump_json().encode()


@example(600, 20, "a")
@given(st.integers(1, 40), st.integers(0, 8), st.text(min_size=1, max_size=40))
def test_what_is_carried_is_what_it_was(nodes: int, count: int, text: str):
    told = tuple(long_incident(number + 1, text) for number in range(count))
    state = large_state(nodes).replace(incidents=told, incident_count=count)
    read = TypeAdapter[JobState | Packed | None](JobState | Packed | None).validate_json(carried(state))
    assert read is not None
    assert isinstance(read, Packed) == (len(state.model_dump_json().encode()) > LARGEST_PLAIN)
    assert unpack(read, JobState) == state


def test_the_largest_job_is_carried_below_the_size_that_the_server_warns_of():
    told = within_budget(tuple(long_incident(number + 1) for number in range(INCIDENTS)))
    state = large_state(MAX_NODES).replace(incidents=told)
    assert len(state.model_dump_json().encode()) > 2 * 1024 * 1024, "as plain JSON the server would refuse it"
    assert len(carried(state)) < 512 * 1024


def test_a_small_state_is_carried_as_every_release_reads_it():
    state = large_state(16)
    assert pack(state) is state
    assert unpack(state, JobState) is state
