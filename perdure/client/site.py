"""What a site's workers are configured to do, for those who reach Temporal only."""

from __future__ import annotations

import secrets
from datetime import timedelta

from temporalio.client import Client as TemporalClient

from perdure.client.connection import CALL_TIMEOUT
from perdure.contract import SiteReport
from perdure.contract.names import READ_SITE, site_workflow_id

_PATIENCE = timedelta(seconds=10)
"""The time that a worker has to answer; it answers from memory."""


async def read_site(temporal: TemporalClient, *, task_queue: str) -> SiteReport:
    """Asks a worker; one answers for all of its site.

    Raises:
        WorkflowFailureError: if no worker answers in time, or it is of a release that cannot.
        RPCError: if the server does not answer.
    """
    return await temporal.execute_workflow(
        READ_SITE,
        id=site_workflow_id(secrets.token_hex(8)),
        task_queue=task_queue,
        result_type=SiteReport,
        execution_timeout=_PATIENCE,
        rpc_timeout=CALL_TIMEOUT,
    )
