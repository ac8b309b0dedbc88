"""A job's notifications: how their deliveries are, and samples of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client as TemporalClient
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from perdure.base.executions import converter_for, describe, query
from perdure.client.connection import CALL_TIMEOUT
from perdure.client.error_mapping import map_errors
from perdure.client.job_calls import JobCalls
from perdure.contract import (
    JobPhase,
    JobStatus,
    Notice,
    NoticeBatch,
    NotifiedIncident,
    NotifiedJob,
    NotifierJob,
    NotifierReport,
)
from perdure.contract.names import NOTIFIER, notifier_workflow_id
from perdure.spec.job import JobSpec
from perdure.spec.notifications import Occasion

_BY_WORKER, _BY_MACHINE = "deliver_notification", "run_notification_command"

SAMPLE_PATIENCE = timedelta(seconds=30)
"""The time for which the delivery of a sample is tried."""


class NotificationCalls(JobCalls):
    """A connection that asks about notifications."""

    async def notifications(self, job: JobStatus) -> NotifierReport:
        """How the deliveries of a job's notifications are; empty where it has had nothing to tell."""
        workflow_id = notifier_workflow_id(job.namespace, job.name, job.uid)
        temporal = await self.connect()
        async with map_errors(self, job.name, job.namespace):
            try:
                handle = temporal.get_workflow_handle(workflow_id)
                report = await query(handle, "report", result_type=NotifierReport, rpc_timeout=CALL_TIMEOUT)
            except RPCError as error:
                if error.status is RPCStatusCode.NOT_FOUND:
                    return NotifierReport()
                raise
            failing = await _failing(temporal, workflow_id)
        return NotifierReport(
            targets=tuple(
                one.replace(last_error=failing[one.name]) if one.name in failing else one for one in report.targets
            )
        )

    async def send_sample(self, spec: JobSpec | Mapping[str, Any] | str | Path) -> NotifierReport:
        """Has a worker send a sample to everyone whom a specification names, as a job's would be; starts no job.

        Raises:
            SpecError: if the specification is wrong.
            PerdureError: if no worker answers.
        """
        from perdure.spec.load import validate_file
        from perdure.spec.validate import validate_spec

        job, _ = validate_file(spec) if isinstance(spec, str | Path) else validate_spec(spec)
        uid = f"test-{secrets.token_hex(4)}"
        about = NotifiedJob(namespace=job.namespace, name=job.name, uid=uid, backend=job.backend, labels=job.labels)
        temporal = await self.connect()
        async with map_errors(self):
            return await temporal.execute_workflow(
                NOTIFIER,
                NotifierJob(job=about, targets=job.notifications, patience=SAMPLE_PATIENCE),
                result_type=NotifierReport,
                id=notifier_workflow_id(job.namespace, job.name, uid),
                task_queue=self.endpoint.task_queue,
                start_signal="notify",
                start_signal_args=[NoticeBatch(notices=(_sample(),), last=True)],
                execution_timeout=2 * SAMPLE_PATIENCE,
                rpc_timeout=2 * SAMPLE_PATIENCE,
                static_summary=f"a sample of the notifications of {job.namespace}/{job.name}",
            )


def _sample() -> Notice:
    return Notice(
        occasion=Occasion.INCIDENT,
        state="begun",
        number=1,
        time=datetime.now(UTC),
        phase=JobPhase.RECOVERING,
        title="a sample that `perdure notify` sent; nothing has happened",
        incident=NotifiedIncident(number=1, role="worker"),
        test=True,
    )


async def _failing(temporal: TemporalClient, workflow_id: str) -> dict[str, str]:
    """Why the deliveries that are in flight have not succeeded, by target."""
    found = await describe(temporal, workflow_id, rpc_timeout=CALL_TIMEOUT)
    reasons: dict[str, str] = {}
    for pending in found.pending_activities:
        kind, target = pending.activity_type.name, pending.activity_id.partition("/")[0]
        if kind not in (_BY_WORKER, _BY_MACHINE):
            continue
        if pending.HasField("last_failure"):
            error = await converter_for(temporal, workflow_id).decode_failure(pending.last_failure)
            reasons[target] = error.message if isinstance(error, ApplicationError) else str(error)
        elif kind == _BY_MACHINE and pending.state == PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED:
            reasons[target] = "no machine of the job has taken it yet; those that joined with a ticket run no commands"
    return reasons
