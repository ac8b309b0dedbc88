"""Notifier: delivers one run's notifications, apart from the job, which waits for no webhook.

Each target has a sender of its own, so that one that hangs delays no other. A delivery is an activity that Temporal
repeats with growing pauses for as long as the notification's patience; then it is given up, and counted. What waits is
bounded: beyond that the oldest are dropped, and the next delivery says how many.

A command of a job whose machines join by themselves runs on one of them, which takes it from a task queue of its run:
Temporal gives it to another one where the first does not answer. Machines leave a while after their job's end.

Started by the first notice, it ends when the job has closed and everything is delivered or given up. Where the job was
terminated and does not say so, it ends after a while without a notice, and a later notice starts another one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception
from temporalio.exceptions import TimeoutError as ActivityTimeout

with workflow.unsafe.imports_passed_through():
    from perdure.base.markdown import code, plain, table
    from perdure.contract import (
        CommandAttempt,
        Notice,
        NoticeBatch,
        NotificationAttempt,
        NotificationBody,
        NotifierJob,
        NotifierReport,
        NotifierState,
        QueuedNotice,
        TargetReport,
        TargetState,
    )
    from perdure.contract.names import NOTIFIER, command_task_queue
    from perdure.spec.job import Backend
    from perdure.workflows import options

MOST_WAITING = 50
"""Notifications that wait for one target."""

BURST = 10
"""Notifications that follow each other without a pause."""

PACE = timedelta(seconds=30)
"""The pause between two notifications after a burst: a job that fails again and again must not bury its readers."""

IDLE = timedelta(hours=1)
"""The time without a notice after which the workflow ends although the job did not say that it closes."""

_KNOWN = 256
"""Keys of notices by which repeats are known; a job hands on 20 at a time."""

_AT_LEAST = timedelta(seconds=30)
"""The shortest time for a delivery, where others before it have used up its patience: one try."""


@workflow.defn(name=NOTIFIER)
class Notifier:
    """The workflow of the deliveries; see the module."""

    @workflow.init
    def __init__(self, job: NotifierJob) -> None:
        self._job = job
        state = job.carried
        self._seen = list(state.seen)
        self._last = state.last
        fresh = TargetState(allowance=BURST)
        self._targets = {name: state.targets.get(name, fresh) for name in job.targets}
        self._received = 0

    @workflow.run
    async def run(self, job: NotifierJob) -> NotifierReport:
        self._show()
        senders = [asyncio.create_task(self._serve(target)) for target in self._targets]
        while not (self._is_over() or self._is_long()):
            received = self._received
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda received=received: self._is_over() or self._is_long() or self._received != received,
                    timeout=IDLE,
                    timeout_summary="ends when it has nothing to do",
                )
                continue
            if self._is_empty():
                break
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        if not self._is_empty():
            state = NotifierState(targets=self._targets, seen=tuple(self._seen), last=self._last)
            workflow.continue_as_new(job.replace(carried=state))
        await workflow.wait_condition(workflow.all_handlers_finished)
        return self.report()

    @workflow.signal(description="Notices of the job")
    def notify(self, batch: NoticeBatch) -> None:
        self._received += 1
        self._last = self._last or batch.last
        fresh = [notice for notice in batch.notices if notice.key not in self._seen]
        self._seen = [*self._seen, *(notice.key for notice in fresh)][-_KNOWN:]
        for name, notification in self._job.targets.items():
            wanted = [notice for notice in fresh if notice.occasion in notification.when or notice.test]
            self._add(name, wanted, lost=batch.lost)
        self._show()

    @workflow.update(
        description="Waits until the job's machines have run all commands",
        unfinished_policy=workflow.HandlerUnfinishedPolicy.ABANDON,
    )
    async def commands_delivered(self) -> None:
        on_machines = [name for name in self._targets if self._runs_on_machine(name)]
        await workflow.wait_condition(lambda: not any(self._targets[name].queue for name in on_machines))

    @workflow.query(description="What was delivered, and what waits")
    def report(self) -> NotifierReport:
        return NotifierReport(
            targets=tuple(
                TargetReport(
                    name=name,
                    sent=state.sent,
                    waiting=len(state.queue),
                    given_up=state.given_up,
                    dropped=state.dropped,
                    last_error=state.last_error,
                )
                for name, state in self._targets.items()
            )
        )

    def _add(self, name: str, notices: list[Notice], *, lost: int) -> None:
        state = self._targets[name]
        queue = [*state.queue, *(QueuedNotice(notice=notice, since=workflow.now()) for notice in notices)]
        # The first one is being delivered.
        excess = max(len(queue) - MOST_WAITING, 0)
        del queue[1 : 1 + excess]
        self._targets[name] = state.replace(
            queue=tuple(queue), dropped=state.dropped + excess + lost, untold=state.untold + excess + lost
        )

    async def _serve(self, name: str) -> None:
        while True:
            await workflow.wait_condition(lambda: bool(self._targets[name].queue))
            await self._keep_pace(name)
            state = self._targets[name]
            head, told = state.queue[0], state.untold
            error = await self._deliver(name, head, dropped=told)
            state = self._targets[name]
            done = {"given_up": state.given_up + 1, "last_error": error} if error else {"sent": state.sent + 1}
            self._targets[name] = state.replace(
                queue=state.queue[1:], untold=state.untold - (0 if error else told), **done
            )
            self._show()

    async def _keep_pace(self, name: str) -> None:
        """Waits until the target may be sent another notification."""
        state, now = self._targets[name], workflow.now()
        regained = (now - state.counted_at) / PACE if state.counted_at is not None else 0.0
        allowance = min(state.allowance + regained, float(BURST))
        if allowance < 1:
            with suppress(TimeoutError):
                await workflow.wait_condition(
                    lambda: self._last and self._runs_on_machine(name),
                    timeout=(1 - allowance) * PACE,
                    timeout_summary=f"{name} was sent many notifications",
                )
            now, allowance = workflow.now(), 1.0
        self._targets[name] = self._targets[name].replace(allowance=allowance - 1, counted_at=now)

    async def _deliver(self, name: str, queued: QueuedNotice, *, dropped: int) -> str:
        """Returns why it was given up; empty where it was delivered."""
        body = NotificationBody.of(self._job.job, queued.notice, dropped=dropped)
        left = self._job.patience - (workflow.now() - queued.since)
        how: dict[str, Any] = {
            "schedule_to_close_timeout": max(left, min(_AT_LEAST, self._job.patience)),
            "start_to_close_timeout": options.NOTIFICATION_ATTEMPT,
            "retry_policy": options.NOTIFICATION_RETRY,
            "activity_id": f"{name}/{body.id}",
            "summary": f"{name}: {queued.notice.title}",
        }
        try:
            if self._runs_on_machine(name):
                return await self._run_on_machine(CommandAttempt(target=name, body=body), how)
            attempt = NotificationAttempt(target=name, notification=self._job.targets[name], body=body)
            await workflow.execute_activity("deliver_notification", attempt, **how)
        except ActivityError as error:
            if is_cancelled_exception(error):
                # This run ends, and the next one delivers it.
                raise asyncio.CancelledError from error
            reason = error.cause
            if isinstance(reason, ActivityTimeout):
                # No time was left for another attempt: the last one says why.
                reason = reason.cause or reason
            return reason.message if isinstance(reason, ApplicationError) else str(reason or error)
        return ""

    def _runs_on_machine(self, name: str) -> bool:
        return self._job.job.backend == Backend.JOINED and self._job.targets[name].command is not None

    async def _run_on_machine(self, attempt: CommandAttempt, how: dict[str, Any]) -> str:
        """Returns why no machine of the job ran the command; empty where one has."""
        if attempt.body.test:
            return "the job's own machines run its commands, and a sample has no job"
        running = workflow.start_activity(
            "run_notification_command",
            attempt,
            result_type=RawValue,
            task_queue=command_task_queue(self._job.job.uid),
            **how,
        )
        await workflow.wait_condition(lambda: self._last or running.done())
        with suppress(TimeoutError):
            await workflow.wait_condition(
                running.done,
                timeout=self._job.after_end,
                timeout_summary="the job's machines leave",
            )
        if not running.done():
            running.cancel()
            return "no machine of the job was left to run it"
        await running
        return ""

    def _is_empty(self) -> bool:
        return not any(state.queue for state in self._targets.values())

    def _is_over(self) -> bool:
        return self._last and self._is_empty()

    def _is_long(self) -> bool:
        info = workflow.info()
        return info.is_continue_as_new_suggested() or info.get_current_history_length() > options.HISTORY_LIMIT

    def _show(self) -> None:
        rows = [
            (
                code(one.name),
                str(one.sent),
                str(one.waiting),
                str(one.given_up),
                str(one.dropped),
                plain(one.last_error),
            )
            for one in self.report().targets
        ]
        head = ("To", "Delivered", "Waiting", "Given up", "Dropped", "Last error")
        workflow.set_current_details("\n".join(table(head, rows)))
