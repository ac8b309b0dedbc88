"""What an operator does to workflows and activities in Temporal's UI or with its command line, by the same calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from temporalio.api.batch.v1 import BatchOperationCancellation, BatchOperationSignal, BatchOperationTermination
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import BatchOperationState
from temporalio.api.workflowservice.v1 import (
    DeleteWorkflowExecutionRequest,
    DescribeBatchOperationRequest,
    PauseActivityRequest,
    PauseWorkflowExecutionRequest,
    ResetActivityRequest,
    StartBatchOperationRequest,
    UnpauseActivityRequest,
    UnpauseWorkflowExecutionRequest,
)
from temporalio.client import Client

from tests.support.waiting import eventually

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

    async def reset_activity(self, workflow_id: str, activity_id: str) -> None:
        """Resets an activity, as `temporal activity reset` does."""
        await self.client.workflow_service.reset_activity(
            ResetActivityRequest(
                namespace=self.client.namespace,
                execution=WorkflowExecution(workflow_id=workflow_id),
                identity=NAME,
                id=activity_id,
            )
        )

    async def delete(self, workflow_id: str) -> None:
        """Deletes a workflow, as `temporal workflow delete` does, and returns once the server does not know it."""
        await self.client.workflow_service.delete_workflow_execution(
            DeleteWorkflowExecutionRequest(
                namespace=self.client.namespace, workflow_execution=WorkflowExecution(workflow_id=workflow_id)
            )
        )

    async def batch(
        self,
        query: str,
        *,
        signal: str = "",
        cancel: bool = False,
        terminate: bool = False,
    ) -> None:
        """Runs a batch operation to its end, as `temporal workflow signal|cancel|terminate --query` does."""
        job_id = str(uuid4())
        request = StartBatchOperationRequest(
            namespace=self.client.namespace, visibility_query=query, job_id=job_id, reason="a test"
        )
        if signal:
            request.signal_operation.CopyFrom(BatchOperationSignal(signal=signal, identity=NAME))
        if cancel:
            request.cancellation_operation.CopyFrom(BatchOperationCancellation(identity=NAME))
        if terminate:
            request.termination_operation.CopyFrom(BatchOperationTermination(identity=NAME))
        await self.client.workflow_service.start_batch_operation(request)

        async def complete() -> bool:
            described = await self.client.workflow_service.describe_batch_operation(
                DescribeBatchOperationRequest(namespace=self.client.namespace, job_id=job_id)
            )
            return described.state == BatchOperationState.BATCH_OPERATION_STATE_COMPLETED

        await eventually(complete, what="the batch operation is complete")

    def _request(self, workflow_id: str) -> dict[str, Any]:
        return {
            "namespace": self.client.namespace,
            "workflow_id": workflow_id,
            "identity": NAME,
            "request_id": str(uuid4()),
        }
