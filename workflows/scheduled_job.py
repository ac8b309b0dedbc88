"""ScheduledJob: starts a job for a schedule of Temporal, and ends with the job's result.

A schedule appends the time to the ID of every workflow that it starts, and the ID of a job is its name. So a schedule
starts this workflow, which starts the job under the name in its specification and lasts as long as the job: the
schedule's overlap policy decides as usual, and a job of that name that still runs is left alone. One that winds down,
because the policy has terminated the workflow that started it, is waited for.
"""

from __future__ import annotations

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, ChildWorkflowError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import JobResult
    from perdure.contract.names import SCHEDULED_JOB, TRAINING_JOB, job_workflow_id
    from perdure.spec.accepted import read_accepted
    from perdure.workflows import options

AWAIT_END = "await_end_of_job"
"""The activity that returns when a job has ended that winds down."""


@workflow.defn(name=SCHEDULED_JOB)
class ScheduledJob:
    """The workflow of one action of a schedule; see the module."""

    @workflow.run
    async def run(self, spec: Any) -> JobResult:
        try:
            job = read_accepted(spec)
        except ValueError as error:
            raise ApplicationError(str(error), type="InvalidSpec", non_retryable=True) from error
        try:
            while True:
                try:
                    return await self._train(job_workflow_id(job.namespace, job.name), spec)
                except WorkflowAlreadyStartedError:
                    await self._await_end(job_workflow_id(job.namespace, job.name))
        except (ActivityError, ChildWorkflowError) as error:
            if isinstance(error.cause, ApplicationError):
                raise error.cause from error
            raise

    async def _train(self, job_id: str, spec: Any) -> JobResult:
        return await workflow.execute_child_workflow(
            TRAINING_JOB,
            spec,
            result_type=JobResult,
            id=job_id,
            # An overlap policy that ends the schedule's earlier workflow means its job, whose nodes wind down.
            parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
            static_summary=f"started by {workflow.info().workflow_id}",
        )

    async def _await_end(self, job_id: str) -> None:
        """Waits for the end of the earlier job of this name if it winds down.

        Raises:
            ActivityError: if it does not.
        """
        await workflow.execute_activity(
            AWAIT_END,
            job_id,
            result_type=type(None),
            start_to_close_timeout=options.AWAIT_END_ATTEMPT,
            retry_policy=options.AWAIT_END_RETRY,
            summary=f"wait until {job_id} has wound down",
        )
