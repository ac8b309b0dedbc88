"""Reads the agents' reports in their leases: the latest view of a node, which needs no history and no worker."""

from __future__ import annotations

import logging
import re

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowExecutionDescription
from temporalio.converter import DataConverter
from temporalio.exceptions import FailureError

from perdure.client.connection import converter_for
from perdure.client.views import NodeLease
from workflows.messages import LeaseView

logger = logging.getLogger(__name__)

_LEASE_ID = re.compile(r"lease/(\d+)/(\d+)/\d+")


async def leases_of(temporal: TemporalClient, group: WorkflowExecutionDescription) -> list[NodeLease]:
    """The latest reports of a group's agents."""
    converter = converter_for(temporal, group.id)
    leases = [await _lease(converter, activity) for activity in group.raw_description.pending_activities]
    return [lease for lease in leases if lease]


async def _lease(converter: DataConverter, activity: PendingActivityInfo) -> NodeLease | None:
    match = _LEASE_ID.fullmatch(activity.activity_id)
    if not match or not activity.heartbeat_details.payloads:
        return None
    try:
        (view,) = await converter.decode(activity.heartbeat_details.payloads, [LeaseView])
    except (FailureError, RuntimeError) as error:
        # Another process may heartbeat by the activity's ID, or the key is not here.
        logger.warning("the report in %s cannot be read: %s", activity.activity_id, error)
        return None
    return NodeLease(rank=int(match[1]), incarnation=int(match[2]), view=view)
