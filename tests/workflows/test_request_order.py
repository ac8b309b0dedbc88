"""Tests that a job handles users' requests in the same order when its history is replayed."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowHandle, WorkflowHistory

from perdure.contract import GroupMissing, ReasonRequest
from tests.support.replays import replay
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import node, running, settled_history
from tests.workflows.ways import REPLAYED

_TASK = [
    EventType.EVENT_TYPE_WORKFLOW_TASK_SCHEDULED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED,
]


def _types(history: WorkflowHistory) -> list[EventType.ValueType]:
    return [event.event_type for event in history.events]


async def _until_it_ends_with(handle: WorkflowHandle[Any, Any], *events: EventType.ValueType) -> int:
    """Returns the history's length once it ends with these events."""

    async def length() -> int | None:
        types = _types(await handle.fetch_history())
        return len(types) if types[-len(events) :] == list(events) else None

    return await eventually(length)


@pytest.mark.long("workflows")
@pytest.mark.parametrize("fleet", [REPLAYED], ids=["replayed"], indirect=True)
async def test_a_request_after_a_task_without_commands_replays_on_a_worker_that_had_to_replay_the_job(fleet: Fleet):
    """Such a worker is given both tasks at once, and the request first; in a later replay the request comes second."""
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    await settled_history(handle)
    fleet.may_end.clear()
    fleet.signals_arrive.clear()
    await handle.execute_update("suspend", ReasonRequest())
    some_node = await node(fleet, handle, 0)
    stranger = some_node.request.node.model_copy(update={"token": "guess"})
    await some_node.to_job("group_missing", GroupMissing, sender=stranger)
    await _until_it_ends_with(handle, EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED, *_TASK)
    fleet.signals_arrive.set()
    before = await _until_it_ends_with(handle, EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED, *_TASK)
    await handle.execute_update("resume", ReasonRequest())
    history = await handle.fetch_history()
    assert _types(history)[before : before + 4] == [*_TASK, EventType.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED]
    await replay(history)
    fleet.may_end.set()
    await running(handle, nodes=2, generation=2)
