"""Tests of a worker that is given nodes of a backend that it does not serve."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.api.workflowservice.v1 import DescribeTaskQueueResponse
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from perdure.activities.nodes.activities import NodeActivities
from perdure.contract import NodeEvents
from tests.activities.test_ray_backend import request


@pytest.mark.parametrize(
    ("identities", "incarnation", "expected", "told"),
    [
        (["this"], 1, "NodeRefused", 0),
        (["this", "gone"], 1, "NodeRefused", 0),
        (["other"], 1, "BackendNotServed", 0),
        (["this"], 2, "BackendNotServed", 1),
    ],
    ids=["alone", "the-other-is-gone", "beside-another", "for-a-job-that-has-had-nodes"],
)
async def test_a_backend_that_another_worker_may_serve_is_left_to_it(
    identities: list[str], incarnation: int, expected: str, told: int
) -> None:
    polled = {"this": time.time(), "gone": time.time() - 200, "other": time.time() - 30}

    class Server:
        async def describe_task_queue(self, request: Any, timeout: timedelta) -> DescribeTaskQueueResponse:
            answer = DescribeTaskQueueResponse()
            for identity in identities:
                answer.pollers.add(identity=identity).last_access_time.FromSeconds(int(polled[identity]))
            return answer

    signals: list[NodeEvents] = []

    class Group:
        id = "group"

        async def signal(self, name: str, events: NodeEvents, rpc_timeout: timedelta) -> None:
            signals.append(events)

    client: Any = SimpleNamespace(
        namespace="default", identity="this", workflow_service=Server(), get_workflow_handle=lambda _: Group()
    )
    asked = request(rank=1)
    asked = asked.replace(node=asked.node.replace(incarnation=incarnation))
    activities = NodeActivities(client, [])
    raised: list[ApplicationError] = []

    async def create() -> None:
        try:
            await activities._backend_for_new(asked)
        except ApplicationError as error:
            raised.append(error)

    await ActivityEnvironment().run(create)
    (error,) = raised
    assert (error.type, error.non_retryable) == (expected, expected == "NodeRefused")
    assert len(signals) == told
    with pytest.raises(ApplicationError) as of_existing:
        activities._backend("kubernetes")
    assert not of_existing.value.non_retryable, "its nodes would never be deleted"
