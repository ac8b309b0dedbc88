"""Reads the agents' reports in their leases, and which leases are paused; needs no history and no worker."""

from __future__ import annotations

from temporalio.client import Client as TemporalClient

from perdure.base.executions import ExecutionDescription
from perdure.base.leases import lease_reports
from perdure.client.pauses import activity_pause_of
from perdure.client.views import NodeLease
from perdure.contract import LeaseView


async def leases_of(temporal: TemporalClient, group: ExecutionDescription) -> list[NodeLease]:
    """The latest reports of a group's agents."""
    return [
        NodeLease(
            rank=one.rank,
            incarnation=one.incarnation,
            view=one.view,
            pause=activity_pause_of(group, one.activity),
        )
        for one in await lease_reports(temporal, group, LeaseView)
    ]
