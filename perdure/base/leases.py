"""Reads the agents' latest reports in the leases of their nodes, which needs no worker."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client

from perdure.base.executions import ExecutionDescription
from perdure.base.payloads import UnreadablePayload, first_value

logger = logging.getLogger(__name__)

ViewT = TypeVar("ViewT")

LEASE_ID: Final = re.compile(r"lease/(\d+)/(\d+)/\d+")
"""The activity ID of a lease: the node's rank, its incarnation, and the lease's epoch."""


@dataclass(frozen=True)
class LeaseReport(Generic[ViewT]):
    """A lease, and what its agent has reported last."""

    rank: int
    incarnation: int
    activity: PendingActivityInfo
    view: ViewT | None = None
    """None before the first report."""


async def lease_reports(temporal: Client, group: ExecutionDescription, view: type[ViewT]) -> list[LeaseReport[ViewT]]:
    """The leases of a group's nodes, with reports of this type."""
    return [
        LeaseReport(int(match[1]), int(match[2]), activity, await _view(temporal, group, activity, view))
        for activity in group.pending_activities
        if (match := LEASE_ID.fullmatch(activity.activity_id))
    ]


async def _view(
    temporal: Client, group: ExecutionDescription, activity: PendingActivityInfo, kind: type[ViewT]
) -> ViewT | None:
    if not activity.heartbeat_details.payloads:
        return None
    try:
        return await first_value(temporal, group.id, activity.heartbeat_details.payloads, kind)
    except UnreadablePayload as error:
        # Another process may heartbeat by the activity's ID, or the key is not here.
        logger.warning("the report in %s cannot be read: %s", activity.activity_id, error)
        return None
