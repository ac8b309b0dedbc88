"""Reads what is known of the machines of a site, from the heartbeats of the activities that watch them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from temporalio.client import Client as TemporalClient

from perdure.base.errors import NoWorker
from perdure.base.executions import ExecutionDescription, find
from perdure.base.payloads import UnreadablePayload, first_value
from perdure.client.connection import CALL_TIMEOUT, Connection
from perdure.client.error_mapping import map_errors
from perdure.contract import ClusterView
from perdure.contract.names import WATCH_CLUSTER, cluster_workflow_id
from perdure.spec.job import Backend

logger = logging.getLogger(__name__)


async def read_clusters(connection: Connection, backends: Iterable[Backend] = Backend) -> list[ClusterView]:
    """Returns the newest view of each backend that a worker of the site watches or has watched.

    Raises:
        NoWorker: if none is watched.
    """
    temporal = await connection.connect()
    found: list[ClusterView] = []
    async with map_errors(connection):
        for backend in backends:
            workflow_id = cluster_workflow_id(connection.endpoint.task_queue, backend)
            described = await find(temporal, workflow_id, rpc_timeout=CALL_TIMEOUT)
            view = await _view(temporal, described) if described is not None else None
            if view is not None:
                found.append(view)
    if not found:
        raise NoWorker(
            "no worker watches machines, or none has seen them yet",
            remedy="A worker does unless PERDURE_CLUSTER is off: see docs/operations.md.",
        )
    return found


async def _view(temporal: TemporalClient, described: ExecutionDescription) -> ClusterView | None:
    for pending in described.pending_activities:
        if pending.activity_type.name != WATCH_CLUSTER or not pending.heartbeat_details.payloads:
            continue
        try:
            return await first_value(temporal, described.id, pending.heartbeat_details.payloads, ClusterView)
        except UnreadablePayload as error:
            # Another process may heartbeat for it, or the key is not here.
            logger.warning("what is known of %s cannot be read: %s", described.id, error)
    return None
