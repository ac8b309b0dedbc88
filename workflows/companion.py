"""What workflows have in common that accompany a job: its datasets, its store.

A NodeGroup starts such a workflow when an agent reports that a rank uses it. It outlives the group, and ends when its
job has ended: an activity watches the job.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from perdure.contract import Message
    from perdure.contract.base import shorten
    from perdure.contract.names import watch_task_queue
    from perdure.workflows import options
    from perdure.workflows.cancellation import uncancelled
    from perdure.workflows.node_record import GroupInput
    from perdure.workflows.patching import starts_again_after_reset


_LONGEST_REFUSAL = 300
"""Characters."""


class JobOwner(Message):
    """The job whose end ends a workflow; argument of `wait_for_job_end`."""

    job_id: str
    job_first_run_id: str
    check: timedelta
    """The time between two queries."""


def owner_of(group: GroupInput) -> JobOwner:
    """The job of a group."""
    return JobOwner(job_id=group.job_id, job_first_run_id=group.job_first_run_id, check=group.spec.timing.owner_check)


async def accompany(owner: JobOwner) -> bool:
    """Waits until the job has ended, or this run of the workflow should end; then no handler is in progress.

    Returns:
        Whether the job has ended. Otherwise the workflow continues as new, without awaiting anything before.
    """
    watch = asyncio.create_task(_wait_for_end(owner))
    await uncancelled(lambda: workflow.wait_condition(lambda: watch.done() or _run_is_long()))
    ended = watch.done()
    if ended:
        watch.result()
    else:
        watch.cancel()
    await uncancelled(lambda: workflow.wait_condition(workflow.all_handlers_finished))
    return ended


async def start_companion(name: str, argument: Message, *, owner: JobOwner, workflow_id: str, summary: str) -> None:
    """Starts a workflow on behalf of a job or its group; does nothing where it runs already.

    One that was terminated begins anew. So does one that has completed, as its job had ended, if that was reset since
    and runs again. Without that it is not started for a job that has just ended.

    Args:
        name: The workflow's type.
        argument: Its argument.
        owner: Its job.
        workflow_id: Its ID.
        summary: For the Temporal UI.
    """
    again = WorkflowIDReusePolicy.ALLOW_DUPLICATE
    for reuse in (WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY, again):
        if reuse is again and not (starts_again_after_reset() and await _job_runs(owner)):
            break
        try:
            await workflow.start_child_workflow(
                name,
                argument,
                id=workflow_id,
                parent_close_policy=workflow.ParentClosePolicy.ABANDON,
                id_reuse_policy=reuse,
                static_summary=summary,
            )
        except WorkflowAlreadyStartedError:
            continue
        return
    workflow.logger.info("%s is already known", workflow_id)


def refusal_of(error: Exception) -> ApplicationError:
    """The refusal of a request on which this release cannot decide. A handler that raised anything else would fail the
    workflow's task as long as the request is repeated, and no other rank would be answered."""
    text = f"this release cannot decide on the request: {type(error).__name__}: {error}"
    workflow.logger.error("a request was refused: %s", text)
    return ApplicationError(shorten(text, _LONGEST_REFUSAL), type="UndecidedRequest")


async def _job_runs(owner: JobOwner) -> bool:
    """Whether the server knows that the job runs."""
    try:
        return await workflow.execute_activity(
            "job_runs",
            owner,
            task_queue=watch_task_queue(workflow.info().task_queue),
            result_type=bool,
            schedule_to_close_timeout=options.OWNER_PATIENCE,
            start_to_close_timeout=options.OWNER_PATIENCE,
            retry_policy=options.OWNER_RETRY,
            summary=f"query whether {owner.job_id} runs again",
        )
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        workflow.logger.warning("%s could not be queried: %s", owner.job_id, error.cause or error)
        return False


async def _wait_for_end(owner: JobOwner) -> None:
    try:
        await workflow.execute_activity(
            "wait_for_job_end",
            owner,
            task_queue=watch_task_queue(workflow.info().task_queue),
            start_to_close_timeout=options.FOREVER,
            heartbeat_timeout=options.OWNER_HEARTBEAT,
            retry_policy=options.OWNER_RETRY,
            summary=f"until {owner.job_id} has ended",
        )
    except ActivityError as error:
        if not is_cancelled_exception(error):
            raise


def _run_is_long() -> bool:
    info = workflow.info()
    return info.is_continue_as_new_suggested() or info.get_current_history_length() > options.HISTORY_LIMIT
