"""Asks the history what jobs like this one have used, for roles with `resources: auto`, before anything else.

A job does not wait for a history: where none answers at once, the default holds.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.contract import AutoResources, HistoryAnswer, HistoryRequest, JobShape
    from perdure.contract.names import history_task_queue
    from perdure.spec.job import JobSpec
    from perdure.workflows.policy.capacity import past_use

_TAKEN_WITHIN = timedelta(seconds=5)
"""A worker that keeps a history takes a question at once."""
_ANSWERED_WITHIN = timedelta(seconds=20)
_MOST_JOBS = 50


async def choose(job: JobSpec) -> tuple[AutoResources, ...]:
    """Chooses what the nodes of each role with `resources: auto` request."""
    shape = JobShape.of(job)
    problem, answer = "", HistoryAnswer()
    try:
        answer = await workflow.execute_activity(
            "read_history",
            HistoryRequest(namespace=job.namespace, shape=shape, limit=_MOST_JOBS),
            task_queue=history_task_queue(workflow.info().task_queue),
            result_type=HistoryAnswer,
            schedule_to_start_timeout=_TAKEN_WITHIN,
            start_to_close_timeout=_ANSWERED_WITHIN,
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary="jobs like this one, for `resources: auto`",
        )
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        known = isinstance(error.cause, ApplicationError)
        problem = f"the history cannot be read: {error.cause}" if known else "no worker that keeps a history answered"
    return past_use.choose_all(job, shape, answer.jobs, problem=problem)
