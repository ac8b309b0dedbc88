"""Reads the specification with which a job runs from its history, which needs no worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from temporalio.client import WorkflowHistoryEventFilterType

from perdure.base.payloads import first_value
from perdure.client.client import Client
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.error_mapping import map_errors
from perdure.contract.names import job_workflow_id


async def recorded_spec(client: Client, name: str, *, namespace: str) -> Mapping[str, Any]:
    """The specification of the job's newest run; values of secrets are in none.

    Raises:
        JobNotFound: if the server does not know the job.
        UnreadablePayload: if it cannot be read here.
    """
    workflow_id = job_workflow_id(namespace, name)
    temporal = await client.connect()
    async with map_errors(client, name, namespace):
        events = temporal.get_workflow_handle(workflow_id).fetch_history_events(
            page_size=1,
            event_filter_type=WorkflowHistoryEventFilterType.ALL_EVENT,
            rpc_timeout=CALL_TIMEOUT,
        )
        async for event in events:
            payloads = event.workflow_execution_started_event_attributes.input.payloads
            spec = await first_value(temporal, workflow_id, payloads)
            return cast(dict[str, Any], spec) if isinstance(spec, dict) else {}
    return {}
