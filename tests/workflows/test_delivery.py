"""Tests that jobs and groups signal each other without blocking each other."""

from __future__ import annotations

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import node, running


async def test_a_job_and_its_group_signal_each_other_through_the_client(temporal_client: Client):
    """A signal by command makes the server lock sender and receiver, and half of all repairs lost 0.5 s by that."""
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        known = await running(job, nodes=2)
        await (await node(fleet, job, 1)).rank_dies()
        await running(job, nodes=2, generation=2)
        for workflow_id in (job.id, *known.groups):
            history = await fleet.client.get_workflow_handle(workflow_id).fetch_history()
            kinds = {event.event_type for event in history.events}
            assert EventType.EVENT_TYPE_SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED not in kinds, workflow_id
