"""Tells when a history grows, by a long poll of the server, which costs nothing while nothing happens and needs no
worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client as TemporalClient


async def history_news(temporal: TemporalClient, workflow_id: str) -> AsyncGenerator[None]:
    """Yields for each event of the workflow's newest run, those that it has already included, and of the runs that it
    continues as; ends once the workflow has closed.

    Raises:
        RPCError: if the server does not know the workflow, or does not answer.
    """
    continues = True
    while continues:
        continues = False
        # Without a run ID this is the newest run; later pages stay with it.
        events = temporal.get_workflow_handle(workflow_id).fetch_history_events(wait_new_event=True)
        async for event in events:
            continues = event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CONTINUED_AS_NEW
            yield
