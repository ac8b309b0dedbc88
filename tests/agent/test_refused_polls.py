"""Tests of a real agent at a real server that refuses its polls, because another one has taken the only one allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import PollActivityTaskQueueRequest
from temporalio.client import Client, WorkflowHandle

from perdure.agent.polls import report_interval
from perdure.contract.agents import PollsRefused
from perdure.contract.names import NODES_PER_GROUP
from tests.agent.harness import Workflows, running_agent
from tests.agent.recorder import Recorder
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually

ONE_POLL = ("--dynamic-config-value", "frontend.namespaceCount=1")


@asynccontextmanager
async def polling(client: Client) -> AsyncIterator[None]:
    """Another agent's poll."""
    queue = TaskQueue(name="of-another-agent")
    request = PollActivityTaskQueueRequest(namespace=client.namespace, task_queue=queue)
    poll = asyncio.create_task(
        client.workflow_service.poll_activity_task_queue(request, retry=True, timeout=timedelta(minutes=5))
    )
    try:
        yield
    finally:
        poll.cancel()
        await asyncio.gather(poll, return_exceptions=True)


async def signals(workflow: WorkflowHandle[Any, Any], name: str) -> list[dict[str, Any]]:
    """What was signalled to a workflow that no worker runs: a worker would poll, too."""
    events = [event.workflow_execution_signaled_event_attributes async for event in workflow.fetch_history_events()]
    return [json.loads(event.input.payloads[0].data) for event in events if event.signal_name == name]


async def test_refused_polls_are_reported_with_their_cause(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("n")
    async with dev_server(options=ONE_POLL) as server:
        client = await server.client()
        job = await client.start_workflow(Recorder.run, id="job/tests/refused", task_queue="nobody")
        group = await client.start_workflow(Recorder.run, id=f"{job.id}/group", task_queue="nobody")
        async with polling(client), running_agent(server, Workflows(client, job, group), folder):
            [refused, *_] = await eventually(lambda: signals(group, "polls_refused"))
            assert refused["cause"] == "namespace concurrent poller limit exceeded"
            # An agent that misses one report is believed until the next one.
            assert PollsRefused.model_validate(refused).lasts == 3 * report_interval(1)


@pytest.mark.parametrize("nodes", [1, 30, 128, 1000])
def test_all_refused_agents_of_a_group_send_it_about_one_signal_a_second(nodes: int) -> None:
    assert min(nodes, NODES_PER_GROUP) / report_interval(nodes).total_seconds() < 1.1
    assert report_interval(nodes) >= timedelta(seconds=30)
