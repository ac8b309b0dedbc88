"""Activities that fail and are tried again, such as the deletion of a node whose cluster is gone: a job waits for them
with no other sign, and only the server knows their last error."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from temporalio.client import Client as TemporalClient

from perdure.base.executions import ExecutionDescription, converter_for, describe_all, time_of
from perdure.base.leases import LEASE_ID
from perdure.base.words import count
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.task_failures import text_of
from perdure.client.views import FailingActivity
from perdure.client.visibility import open_workflows_of

_ATTEMPTS = 3
"""Attempts that fail before it is worth a warning: two may fail while a worker restarts."""
_MOST_SHOWN = 3
"""Warnings of one job: a backend that is away fails everything in the same way."""
_LONGEST_CAUSE = 300


async def failing_below(temporal: TemporalClient, job_id: str) -> tuple[FailingActivity, ...]:
    """The activities of a job and of all open workflows that belong to it whose last attempts failed.

    Raises:
        RPCError: if the server does not answer.
    """
    described = await describe_all(temporal, await open_workflows_of(temporal, job_id), rpc_timeout=CALL_TIMEOUT)
    return tuple([one for workflow in described for one in await failing_of(temporal, workflow)])


async def failing_of(temporal: TemporalClient, workflow: ExecutionDescription) -> list[FailingActivity]:
    """The activities of one workflow whose last attempts failed."""
    converter = converter_for(temporal, workflow.id)
    return [
        FailingActivity(
            workflow_id=workflow.id,
            activity_type=activity.activity_type.name,
            attempt=activity.attempt,
            cause=(await text_of(converter, activity.last_failure))[:_LONGEST_CAUSE],
            since=time_of(activity.scheduled_time),
        )
        for activity in (workflow.pending_activities if workflow.is_open else ())
        # Nodes tell of their leases themselves.
        if activity.attempt > _ATTEMPTS
        and activity.HasField("last_failure")
        and not LEASE_ID.fullmatch(activity.activity_id)
    ]


def describe_failing(failing: Iterable[FailingActivity], *, now: datetime | None = None) -> list[str]:
    """The activities as warnings of a job, each error once."""
    by_cause = {(one.activity_type, one.cause): one for one in failing}
    return [_explain(one, now or datetime.now(UTC)) for one in list(by_cause.values())[:_MOST_SHOWN]]


def _explain(failing: FailingActivity, now: datetime) -> str:
    seconds = max(0, round((now - failing.since).total_seconds()))
    failed = f"{failing.activity_type} of {failing.workflow_id} has failed {count(failing.attempt - 1, 'time')}"
    return f"{failed} in {seconds} s, and is tried again until it succeeds: {failing.cause}"
