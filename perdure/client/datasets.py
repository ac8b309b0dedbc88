"""Asks the datasets of a job how far they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowQueryFailedError
from temporalio.service import RPCError

from perdure.base.executions import QueryRejected, list_executions, query, quoted
from perdure.client.connection import CALL_TIMEOUT
from perdure.contract import DatasetView
from perdure.contract.names import dataset_workflow_id

_MOST = 20
"""Datasets that are asked."""


async def read_datasets(temporal: TemporalClient, job_id: str, uid: str) -> Mapping[str, DatasetView]:
    """The datasets of a job's run by their names; without those that do not answer now."""
    prefix = dataset_workflow_id(job_id, uid, "")
    listed = list_executions(
        temporal, f"WorkflowId STARTS_WITH {quoted(prefix)}", limit=_MOST, rpc_timeout=CALL_TIMEOUT
    )
    ids = sorted({one.id async for one in listed})
    views = await asyncio.gather(*(_view(temporal, one) for one in ids))
    return {one.removeprefix(prefix): view for one, view in zip(ids, views, strict=True) if view}


async def _view(temporal: TemporalClient, workflow_id: str) -> DatasetView | None:
    handle = temporal.get_workflow_handle(workflow_id)
    try:
        return await query(handle, "progress", result_type=DatasetView, rpc_timeout=CALL_TIMEOUT)
    except (RPCError, WorkflowQueryFailedError, QueryRejected):
        return None
