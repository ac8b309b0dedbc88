"""Reads the agents' reports in their leases: the latest view of a node, which needs no history and no worker."""

from __future__ import annotations

import re

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowExecutionDescription

from perdure.client.views import LeaseHeard
from workflows.messages import LeaseView

_LEASE_ID = re.compile(r"lease/(\d+)/(\d+)/\d+")


async def leases_of(temporal: TemporalClient, group: WorkflowExecutionDescription) -> list[LeaseHeard]:
    """The latest reports of a group's agents."""
    heard = [await _lease(temporal, activity) for activity in group.raw_description.pending_activities]
    return [lease for lease in heard if lease]


async def _lease(temporal: TemporalClient, activity: PendingActivityInfo) -> LeaseHeard | None:
    match = _LEASE_ID.fullmatch(activity.activity_id)
    if not match or not activity.heartbeat_details.payloads:
        return None
    (view,) = await temporal.data_converter.decode(activity.heartbeat_details.payloads, [LeaseView])
    return LeaseHeard(rank=int(match[1]), incarnation=int(match[2]), view=view)
