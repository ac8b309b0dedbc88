"""Reads the specification with which a job was started from its history, which needs no worker of the job."""

from __future__ import annotations

from datetime import timedelta

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryRequest
from temporalio.client import Client

from perdure.base.executions import Execution
from perdure.base.payloads import first_value
from perdure.spec.accepted import read_accepted
from perdure.spec.job import JobSpec


async def recorded_spec(client: Client, execution: Execution, *, rpc_timeout: timedelta) -> JobSpec:
    """Returns the specification of a run.

    Raises:
        ValueError: if it cannot be read here: by this release, or without its key.
        RPCError: if the server does not answer.
    """
    request = GetWorkflowExecutionHistoryRequest(
        namespace=client.namespace,
        execution=WorkflowExecution(workflow_id=execution.id, run_id=execution.run_id),
        maximum_page_size=1,
    )
    answered = await client.workflow_service.get_workflow_execution_history(request, timeout=rpc_timeout)
    started = answered.history.events[0].workflow_execution_started_event_attributes
    return read_accepted(await first_value(client, execution.id, started.input.payloads))
