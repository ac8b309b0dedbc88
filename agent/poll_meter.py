"""Counts how an agent's polls for commands end.

A server that lacks capacity refuses polls at once, and the SDK polls again after pauses that grow to 10 s, without an
error that anyone sees. Only its metrics show it: such polls end at once and bring nothing.
"""

from __future__ import annotations

from temporalio.runtime import MetricBuffer

_MOST_UPDATES = 10_000
"""Updates that wait for a look: an agent makes a few a second."""
_AT_ONCE = 1_000
"""Milliseconds. A poll that brings nothing and that the server has accepted lasts for a minute."""


class PollMeter:
    """The polls of the process's SDK runtime that has `buffer` for its metrics."""

    def __init__(self) -> None:
        self.buffer = MetricBuffer(_MOST_UPDATES)

    def are_refused(self) -> bool:
        """Whether polls have ended at once without a command since the last call; perhaps true where a command was
        received at this moment."""
        at_once = received = 0
        for update in self.buffer.retrieve_updates():
            name = update.metric.name
            if name == "temporal_long_request_latency":
                polls = update.attributes.get("operation") == "PollActivityTaskQueue"
                at_once += polls and update.value < _AT_ONCE
            elif name == "temporal_activity_task_received":
                received += 1
        return at_once > received
