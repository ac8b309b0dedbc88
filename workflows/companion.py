"""What workflows have in common that accompany a job: its datasets, its store.

A NodeGroup starts such a workflow when an agent reports that a rank uses it. It outlives the group, and ends when its
job has ended: an activity watches the job.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ActivityError, WorkflowAlreadyStartedError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from perdure.contract import Message
    from perdure.contract.names import watch_task_queue
    from perdure.workflows import options
    from perdure.workflows.cancellation import uncancelled
    from perdure.workflows.node_record import GroupInput


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


async def start_companion(name: str, argument: Message, *, workflow_id: str, summary: str) -> None:
    """Starts a workflow on behalf of a group; does nothing where it runs already.

    One that has completed belongs to a job that has ended, so it is not started again; one that was terminated begins
    anew.

    Args:
        name: The workflow's type.
        argument: Its argument.
        workflow_id: Its ID.
        summary: For the Temporal UI.
    """
    try:
        await workflow.start_child_workflow(
            name,
            argument,
            id=workflow_id,
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
            static_summary=summary,
        )
    except WorkflowAlreadyStartedError:
        workflow.logger.info("%s is already known", workflow_id)


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
