"""Hands a job's notices to the workflow that delivers them: see `perdure.workflows.notifier`.

The job itself delivers nothing, and so waits for no webhook. A job without `notifications` does nothing here.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import Notice, NoticeBatch, NotifiedJob, NotifierJob
    from perdure.spec.job import JobSpec
    from perdure.workflows import options
    from perdure.workflows.policy.record.notices import notices_between
    from perdure.workflows.policy.state.job import JobState

_TOGETHER = 20
"""Notices of one message."""

_MOST = 200
"""Notices that wait to be handed on while the server refuses them; more are counted only."""


class JobNotices:
    """The notices of one run of a job.

    Invariants:
        - Notices are noted at any time, and handed on by the main loop only: see `TrainingJob._take_request`.
        - Nothing here rides through continue-as-new: the job continues once `are_settled`.
    """

    def __init__(self) -> None:
        self._pending: list[Notice] = []
        self._lost = 0
        self._sender: asyncio.Task[None] | None = None

    @property
    def have_unsent(self) -> bool:
        """Whether the main loop should start to hand notices on."""
        return bool(self._pending) and self._is_idle

    @property
    def are_settled(self) -> bool:
        return not self._pending and self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self._sender is None or self._sender.done()

    def note(self, before: JobState, after: JobState, job: JobSpec, now: datetime) -> None:
        """Notes what a decision changed."""
        if not job.notifications or after is before:
            return
        self._pending.extend(notices_between(before, after, job, now))
        self._lost += len(self._pending[_MOST:])
        del self._pending[_MOST:]

    def start_sender(self, state: JobState, job: JobSpec) -> None:
        """Hands on what was noted, while the job continues."""
        if self.have_unsent:
            self._sender = asyncio.create_task(self._send_all(state, job))

    async def close(self, state: JobState, job: JobSpec) -> None:
        """Hands on what is left, and that no more follows."""
        if not job.notifications:
            return
        if self._sender is not None:
            await workflow.wait([self._sender])
        await self._send_all(state, job)
        await self._send(state, job, NoticeBatch(lost=self._lost, last=True))

    async def _send_all(self, state: JobState, job: JobSpec) -> None:
        while self._pending:
            notices, lost = tuple(self._pending[:_TOGETHER]), self._lost
            del self._pending[: len(notices)]
            self._lost = 0
            if not await self._send(state, job, NoticeBatch(notices=notices, lost=lost)):
                self._lost += lost + len(notices)

    async def _send(self, state: JobState, job: JobSpec, batch: NoticeBatch) -> bool:
        about = NotifiedJob(
            namespace=state.namespace, name=state.name, uid=state.uid, backend=job.backend, labels=job.labels
        )
        try:
            await workflow.execute_activity(
                "notify",
                args=[NotifierJob(job=about, targets=job.notifications), batch],
                start_to_close_timeout=options.SIGNAL_TIMEOUT,
                retry_policy=options.NOTIFY_RETRY,
                summary=_summary(batch),
            )
        except ActivityError as error:
            workflow.logger.error("notices are lost, as they could not be handed on: %s", error.cause or error)
            return False
        return True


def _summary(batch: NoticeBatch) -> str:
    titles = [notice.title for notice in batch.notices]
    if not titles:
        return "no more notifications follow"
    more = f", and {len(titles) - 1} more" if len(titles) > 1 else ""
    return f"notify: {titles[0]}{more}"
