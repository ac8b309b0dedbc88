"""The workflows of the history: one that has jobs recorded for as long as it runs, and one that asks about the past.

No job knows of them, so that none waits for a database. Both have a worker do the work that keeps a history, by a queue
that only such workers serve; users who can reach Temporal only are answered by it, and only for the jobs of their
Temporal namespace.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from perdure.contract import HistoryAnswer, HistoryRequest
    from perdure.contract.names import HISTORY_RECORDER, READ_HISTORY, history_task_queue
    from perdure.workflows import options

_HEARTBEAT = timedelta(minutes=1)
"""Another worker takes over after this time."""
_RETRY = RetryPolicy(initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(minutes=1))
"""Indefinite: a database that is away is written later."""
_TAKEN_WITHIN = timedelta(seconds=10)
"""A worker that keeps a history takes a question at once."""
_ANSWERED_WITHIN = timedelta(seconds=60)


@workflow.defn(name=HISTORY_RECORDER)
class HistoryRecorder:
    """The workflow that has jobs recorded; see the module."""

    @workflow.run
    async def run(self) -> None:
        await workflow.execute_activity(
            "record_history",
            task_queue=history_task_queue(workflow.info().task_queue),
            start_to_close_timeout=options.FOREVER,
            heartbeat_timeout=_HEARTBEAT,
            retry_policy=_RETRY,
            summary="records jobs until it is cancelled",
        )
        workflow.continue_as_new()


@workflow.defn(name=READ_HISTORY)
class ReadHistory:
    """The workflow that asks; see the module."""

    @workflow.run
    async def run(self, request: HistoryRequest | None = None) -> HistoryAnswer:
        return await workflow.execute_activity(
            "read_history",
            request or HistoryRequest(),
            task_queue=history_task_queue(workflow.info().task_queue),
            result_type=HistoryAnswer,
            schedule_to_start_timeout=_TAKEN_WITHIN,
            start_to_close_timeout=_ANSWERED_WITHIN,
            retry_policy=RetryPolicy(maximum_attempts=2),
        )
