"""Workers that serve a task queue: their identities in Temporal, and who polls a queue."""

from __future__ import annotations

import socket

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client as TemporalClient

from perdure.client.connection import CALL_TIMEOUT


def worker_identity(pid: int) -> str:
    """The identity of a worker in Temporal: its process and its machine."""
    return f"perdure-worker/{pid}@{socket.gethostname()}"


async def pollers(client: TemporalClient, task_queue: str, kind: TaskQueueType.ValueType) -> dict[str, float]:
    """The pollers of a task queue: identities, with the time of each one's last poll in seconds since the epoch."""
    request = DescribeTaskQueueRequest(
        namespace=client.namespace, task_queue=TaskQueue(name=task_queue), task_queue_type=kind
    )
    answer = await client.workflow_service.describe_task_queue(request, timeout=CALL_TIMEOUT)
    return {poller.identity: poller.last_access_time.ToNanoseconds() / 1e9 for poller in answer.pollers}
