"""Reads the agents' latest reports in the leases of their nodes, which needs no worker."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Final

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client
from temporalio.converter import DataConverter
from temporalio.exceptions import FailureError

from perdure.base.executions import ExecutionDescription, converter_for
from perdure.contract import LeaseView

logger = logging.getLogger(__name__)

LEASE_ID: Final = re.compile(r"lease/(\d+)/(\d+)/\d+")
"""The activity ID of a lease: the node's rank, its incarnation, and the lease's epoch."""


@dataclass(frozen=True)
class LeaseReport:
    """A lease, and what its agent has reported last."""

    rank: int
    incarnation: int
    activity: PendingActivityInfo
    view: LeaseView | None = None
    """None before the first report."""


async def lease_reports(temporal: Client, group: ExecutionDescription) -> list[LeaseReport]:
    """The leases of a group's nodes."""
    converter = converter_for(temporal, group.id)
    return [
        LeaseReport(int(match[1]), int(match[2]), activity, await _view(converter, activity))
        for activity in group.pending_activities
        if (match := LEASE_ID.fullmatch(activity.activity_id))
    ]


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
