"""Signals between a job and its groups, sent by the worker's client from an activity.

A signal that a workflow sends by command is a task of the server that locks the sending workflow and requests the lock
of the receiving one. Two workflows that signal each other in the same milliseconds then wait for each other until the
server's time limit (500 ms by default). A client's signal locks the receiver only.

The activity is not a local one: a local activity keeps the sender's workflow task open, and the sender receives no
events meanwhile.

An attempt that seemed to fail may still have arrived, so receivers drop repeats: desired states have versions, messages
of a group have sequence numbers.
"""

from __future__ import annotations

from enum import StrEnum

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import Adopt, GroupDesire, GroupTransitions
    from perdure.workflows import options


class Delivery(StrEnum):
    """Results of sending a signal."""

    TAKEN = "TAKEN"
    CLOSED = "CLOSED"
    """No open workflow has this ID."""
    FAILED = "FAILED"
    """The server did not accept it; it may still have arrived."""


SIGNAL_ACTIVITIES = {"desire": "signal_desire", "adopt": "signal_adopt", "transitions": "signal_transitions"}
"""The activity for each signal name: one for each type of message."""


async def deliver(workflow_id: str, signal: str, message: GroupDesire | Adopt | GroupTransitions) -> Delivery:
    """Signals the current run of a workflow."""
    try:
        return await workflow.execute_activity(
            SIGNAL_ACTIVITIES[signal],
            args=[workflow_id, message],
            result_type=Delivery,
            start_to_close_timeout=options.SIGNAL_TIMEOUT,
            retry_policy=options.SIGNAL_RETRY,
            summary=f"{signal} to {_short(workflow_id)}",
        )
    except ActivityError as error:
        workflow.logger.warning("%s was not delivered to %s: %s", signal, workflow_id, error.cause or error)
        return Delivery.FAILED


def _short(workflow_id: str) -> str:
    """A job or one of its groups, as people know it within the job."""
    _, _, *rest = workflow_id.split("/")
    return "/".join(rest[2:]) or "the job"
