"""Workflows and activities that an operator has paused in Temporal: a job waits for them, and only the server knows.

Neither a paused workflow nor the workflow of a paused activity can report it. So it is read from the server's
descriptions of the job and of everything that belongs to it: groups, datasets, the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client as TemporalClient

from perdure.base.executions import ExecutionDescription, ExecutionStatus, describe_all, time_of
from perdure.base.leases import LEASE_ID
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.views import Pause
from perdure.client.visibility import open_workflows_of


def pause_of(workflow: ExecutionDescription) -> Pause | None:
    """The pause of the workflow itself."""
    if workflow.status is not ExecutionStatus.PAUSED:
        return None
    info = workflow.raw.workflow_extended_info.pause_info
    return Pause(workflow_id=workflow.id, by=info.identity, reason=info.reason, since=_since(info.paused_time))


def activity_pause_of(workflow: ExecutionDescription, activity: PendingActivityInfo) -> Pause | None:
    """The pause of one of the workflow's activities."""
    if not activity.paused:
        return None
    info = activity.pause_info
    who = info.rule if info.WhichOneof("paused_by") == "rule" else info.manual
    return Pause(
        workflow_id=workflow.id,
        activity_id=activity.activity_id,
        activity_type=activity.activity_type.name,
        by=who.identity,
        reason=who.reason,
        since=_since(info.pause_time),
    )


def pauses_of(workflow: ExecutionDescription) -> tuple[Pause, ...]:
    """The pauses of the workflow and of its activities."""
    found = (pause_of(workflow), *(activity_pause_of(workflow, one) for one in workflow.pending_activities))
    return tuple(pause for pause in found if pause)


async def pauses_below(temporal: TemporalClient, job_id: str) -> tuple[Pause, ...]:
    """The pauses of a job and of all open workflows that belong to it.

    Raises:
        RPCError: if the server does not answer.
    """
    described = await describe_all(temporal, await open_workflows_of(temporal, job_id), rpc_timeout=CALL_TIMEOUT)
    return tuple(pause for workflow in described if workflow.is_open for pause in pauses_of(workflow))


def explain(pause: Pause, *, now: datetime | None = None) -> str:
    """Describes the pause in a sentence without its end."""
    seconds = (
        f" for {max(0, round(((now or datetime.now(UTC)) - pause.since).total_seconds()))} s" if pause.since else ""
    )
    by = f" by {pause.by}" if pause.by else ""
    reason = f": {pause.reason}" if pause.reason else ""
    return f"{_subject(pause)} is paused in Temporal{seconds}{by}{reason}"


def unpause_command(pause: Pause) -> str:
    """The command that ends the pause."""
    if not pause.activity_id:
        return f"perdure temporal workflow unpause --workflow-id {pause.workflow_id}"
    return f"perdure temporal activity unpause --workflow-id {pause.workflow_id} --activity-id {pause.activity_id}"


def remedy(pause: Pause) -> str:
    """The advice to the user."""
    if not pause.activity_id:
        effect = "Running nodes continue to train, and what they report is handled then."
    elif LEASE_ID.fullmatch(pause.activity_id):
        effect = "The node continues to train; its progress is not seen until then, and its loss may be noticed late."
    else:
        effect = "What depends on it waits until then."
    return f"Unpause it: {unpause_command(pause)}. {effect}"


def describe_pauses(pauses: Sequence[Pause]) -> list[str]:
    """The pauses with their remedies, as warnings of a job."""
    return [f"{explain(pause)}. {remedy(pause)}" for pause in pauses]


def _subject(pause: Pause) -> str:
    if not pause.activity_id:
        return f"the workflow {pause.workflow_id}"
    if lease := LEASE_ID.fullmatch(pause.activity_id):
        return f"the lease of node {lease[1]}.{lease[2]}"
    return f"{pause.activity_type} ({pause.activity_id}) of {pause.workflow_id}"


def _since(stamp: Timestamp) -> datetime | None:
    return time_of(stamp) if stamp.seconds else None
