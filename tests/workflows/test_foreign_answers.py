"""An agent that was taken over writes what it likes where its group reads: no other node of the group suffers."""

from __future__ import annotations

from typing import Literal

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.common import RawValue

from perdure.contract import Accepted, JobPhase, RestartRequest
from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import node, running, until
from tests.workflows.test_malformed_messages import as_users_connect

FOREIGN = RawValue(Payload(metadata={"encoding": b"x/y"}, data=b"x"))
"""What no converter reads."""
QUICK = {
    "lease": {"timeout": "2s", "heartbeat": "500ms", "schedule_to_start": "2s"},
    "commands": {"schedule_to_start": "2s", "start_to_close": "1s"},
}


@pytest.mark.parametrize("place", ["answer", "details", "heartbeat"])
async def test_a_group_decides_on_whatever_one_of_its_agents_writes(
    temporal_client: Client, place: Literal["answer", "details", "heartbeat"]
):
    async with running_fleet(await as_users_connect(temporal_client)) as fleet:
        job = await submit(fleet, job_spec("2", timing=QUICK))
        known = await running(job, nodes=2)
        taken = await node(fleet, job, 1)
        taken.writes, taken.writes_as = FOREIGN, place
        if place == "heartbeat":
            await taken.restart()
        await job.execute_update("restart", RestartRequest(reason="once more"), result_type=Accepted)
        # It takes the restart's world only where it does not answer that it does.
        if place != "heartbeat":
            await node(fleet, job, 1, incarnation=2)
        await until(job, lambda s: s.phase is JobPhase.RUNNING and s.nodes == 2 and s.generation > known.generation)
        for workflow_id in (job.id, *known.groups):
            history = await fleet.client.get_workflow_handle(workflow_id).fetch_history()
            failed = [e for e in history.events if e.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED]
            causes = [e.workflow_task_failed_event_attributes.failure.message for e in failed]
            assert "Failed decoding arguments" not in causes
