"""Reports that the Temporal server refuses to hand the agent commands: its silence then says nothing about its node."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from perdure.agent.outbox import MessageSink, envelope
from perdure.agent.transport import ControlPlane
from perdure.contract.agents import PollsRefused
from perdure.contract.identity import NodeCredentials

logger = logging.getLogger(__name__)

_LOOKS = 2.0
"""Seconds between two looks at the SDK's counts, which cannot be awaited. A node is given up for its silence after 6 s
at the earliest."""
_SHORTEST_INTERVAL = timedelta(seconds=30)
_LONGEST_INTERVAL = timedelta(seconds=120)
_INTERVAL_PER_NODE = timedelta(seconds=1)
"""Between two reports of one agent for each node of the job: a group has at most 128 nodes, so all of them together
send it about one signal a second. A server that lacks capacity must take these signals, too."""
_COUNTS_FOR = 3
"""Intervals for which the job believes a report."""


def report_interval(nodes: int) -> timedelta:
    """Returns the time between two reports of one agent.

    Args:
        nodes: The nodes of the job.
    """
    return min(max(_SHORTEST_INTERVAL, nodes * _INTERVAL_PER_NODE), _LONGEST_INTERVAL)


async def report_refused_polls(
    control: ControlPlane, node: NodeCredentials, *, nodes: int, to_group: MessageSink
) -> None:
    """Reports refused polls, and again while they last.

    Args:
        control: Polls, and knows how that goes.
        node: The agent's node.
        nodes: The nodes of the job.
        to_group: Receives the reports.
    """
    interval = report_interval(nodes)
    loop = asyncio.get_running_loop()
    reported: float | None = None
    while True:
        await asyncio.sleep(_LOOKS)
        if reported is not None and loop.time() - reported < interval.total_seconds():
            continue
        if cause := await control.why_refused():
            logger.warning("the Temporal server refuses polls for commands: %s", cause)
            reported = loop.time()
            to_group.put(PollsRefused(**envelope(node), cause=cause, lasts=_COUNTS_FOR * interval))
