"""Reports that the Temporal server refuses to hand the agent commands: its silence then says nothing about its node."""

from __future__ import annotations

import asyncio
import logging

from perdure.agent.outbox import MessageSink, envelope
from perdure.agent.transport import ControlPlane
from perdure.contract.agents import PollsRefused
from perdure.contract.identity import NodeCredentials

logger = logging.getLogger(__name__)

_LOOKS = 2.0
"""Seconds between two looks at the SDK's counts, which cannot be awaited. A node is given up for its silence after 6 s
at the earliest."""
_REPORT_AGAIN = 30.0
"""Seconds between two reports, of which the job believes each for three times as long."""


async def report_refused_polls(control: ControlPlane, node: NodeCredentials, *, to_group: MessageSink) -> None:
    """Reports refused polls, and again while they last.

    Args:
        control: Polls, and knows how that goes.
        node: The agent's node.
        to_group: Receives the reports.
    """
    loop = asyncio.get_running_loop()
    reported: float | None = None
    while True:
        await asyncio.sleep(_LOOKS)
        if reported is not None and loop.time() - reported < _REPORT_AGAIN:
            continue
        if cause := await control.why_refused():
            logger.warning("the Temporal server refuses polls for commands: %s", cause)
            reported = loop.time()
            to_group.put(PollsRefused(**envelope(node), cause=cause))
