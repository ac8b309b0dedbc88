"""An attacker who has taken over a node: it has the node's grant and token, and the whole of Temporal's SDK."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

import pytest
import temporalio.api.workflowservice.v1 as service
from temporalio.api.common.v1 import Payload, WorkflowExecution
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from tests.agent.harness import Workflows
from tests.gateway.site import GatewaySite


class Attacker:
    """One who took over the node of a grant."""

    def __init__(self, site: GatewaySite, workflows: Workflows, client: Client) -> None:
        self.site, self.workflows, self.client = site, workflows, client
        self.namespace = site.server.namespace

    async def refused(self, call: Awaitable[Any], status: RPCStatusCode, reason: str = "") -> None:
        with pytest.raises(RPCError) as refusal:
            await call
        assert refusal.value.status is status, refusal.value
        assert reason in refusal.value.message

    def poll(self, queue: str, **fields: Any) -> Awaitable[service.PollActivityTaskQueueResponse]:
        request = service.PollActivityTaskQueueRequest(
            **dict[str, Any](namespace=self.namespace, task_queue=TaskQueue(name=queue)) | fields
        )
        return self.client.workflow_service.poll_activity_task_queue(request)

    def signal(self, workflow: str, name: str, message: Any, **fields: Any) -> Awaitable[Any]:
        request = service.SignalWorkflowExecutionRequest(
            **dict[str, Any](
                namespace=self.namespace,
                workflow_execution=WorkflowExecution(workflow_id=workflow),
                signal_name=name,
            )
            | fields
        )
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        request.input.payloads.append(Payload(metadata={"encoding": b"json/plain"}, data=data))
        return self.client.workflow_service.signal_workflow_execution(request)
