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


@pytest.mark.parametrize(
    ("identities", "expected"),
    [(["this"], "NodeRefused"), (["this", "gone"], "NodeRefused"), (["other"], "BackendNotServed")],
)
async def test_a_backend_that_another_worker_may_serve_is_left_to_it(identities: list[str], expected: str) -> None:
    polled = {"this": time.time(), "gone": time.time() - 200, "other": time.time() - 30}

    class Server:
        async def describe_task_queue(self, request: Any, timeout: timedelta) -> DescribeTaskQueueResponse:
            answer = DescribeTaskQueueResponse()
            for identity in identities:
                answer.pollers.add(identity=identity).last_access_time.FromSeconds(int(polled[identity]))
            return answer

    client: Any = SimpleNamespace(namespace="default", identity="this", workflow_service=Server())
    activities = NodeActivities(client, [])
    raised: list[ApplicationError] = []

    async def create() -> None:
        try:
            await activities._backend_for_new("kubernetes")
        except ApplicationError as error:
            raised.append(error)

    await ActivityEnvironment().run(create)
    (error,) = raised
    assert (error.type, error.non_retryable) == (expected, expected == "NodeRefused")
    with pytest.raises(ApplicationError) as of_existing:
        activities._backend("kubernetes")
    assert not of_existing.value.non_retryable, "its nodes would never be deleted"
