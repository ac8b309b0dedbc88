"""Reads the agents' reports in their leases: the latest view of a node, which needs no history and no worker."""

from __future__ import annotations

import logging

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client as TemporalClient
from temporalio.converter import DataConverter
from temporalio.exceptions import FailureError

from perdure.base.executions import ExecutionDescription, converter_for
from perdure.client.pauses import LEASE_ID, activity_pause_of
from perdure.client.views import NodeLease
from perdure.contract import LeaseView

logger = logging.getLogger(__name__)


async def leases_of(temporal: TemporalClient, group: ExecutionDescription) -> list[NodeLease]:
    """The latest reports of a group's agents."""
    converter = converter_for(temporal, group.id)
    leases: list[NodeLease] = []
    for activity in group.pending_activities:
        if match := LEASE_ID.fullmatch(activity.activity_id):
            view, pause = await _view(converter, activity), activity_pause_of(group, activity)
            leases.append(NodeLease(rank=int(match[1]), incarnation=int(match[2]), view=view, pause=pause))
    return leases


async def _view(converter: DataConverter, activity: PendingActivityInfo) -> LeaseView | None:
    if not activity.heartbeat_details.payloads:
        return None
    try:
        (view,) = await converter.decode(activity.heartbeat_details.payloads, [LeaseView])
    except (FailureError, RuntimeError) as error:
        # Another process may heartbeat by the activity's ID, or the key is not here.
        logger.warning("the report in %s cannot be read: %s", activity.activity_id, error)
        return None
    return view
