"""What an operator does to workflows and activities in Temporal's UI or with its command line, by the same calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import (
    PauseActivityRequest,
    PauseWorkflowExecutionRequest,
    UnpauseActivityRequest,
    UnpauseWorkflowExecutionRequest,
)
from temporalio.client import Client

NAME = "operator@example"


@dataclass(frozen=True)
class Operator:
    """An operator of the server's default namespace."""

    client: Client

    async def pause(self, workflow_id: str, *, reason: str = "maintenance") -> None:
        """Pauses a workflow, as `temporal workflow pause` does."""
        await self.client.workflow_service.pause_workflow_execution(
            PauseWorkflowExecutionRequest(**self._request(workflow_id), reason=reason)
        )

    async def unpause(self, workflow_id: str) -> None:
        """Unpauses a workflow, as `temporal workflow unpause` does."""
        await self.client.workflow_service.unpause_workflow_execution(
            UnpauseWorkflowExecutionRequest(**self._request(workflow_id))
        )

    async def pause_activity(self, workflow_id: str, activity_id: str, *, reason: str = "maintenance") -> None:
        """Pauses an activity, as `temporal activity pause` does."""
        await self.client.workflow_service.pause_activity(
            PauseActivityRequest(
                namespace=self.client.namespace,
                execution=WorkflowExecution(workflow_id=workflow_id),
                identity=NAME,
                id=activity_id,
                reason=reason,
            )
        )

    async def unpause_activity(self, workflow_id: str, activity_id: str) -> None:
        """Unpauses an activity, as `temporal activity unpause` does."""
        await self.client.workflow_service.unpause_activity(
            UnpauseActivityRequest(
                namespace=self.client.namespace,
                execution=WorkflowExecution(workflow_id=workflow_id),
                identity=NAME,
                id=activity_id,
            )
        )

    def _request(self, workflow_id: str) -> dict[str, Any]:
        return {
            "namespace": self.client.namespace,
            "workflow_id": workflow_id,
            "identity": NAME,
            "request_id": str(uuid4()),
        }
