"""ScheduledJob: starts a job for a schedule of Temporal, and ends with the job's result.

A schedule appends the time to the ID of every workflow that it starts, and the ID of a job is its name. So a schedule
starts this workflow, which starts the job under the name in its specification and lasts as long as the job: the
schedule's overlap policy decides as usual, and a job of that name that still runs is left alone.
"""

from __future__ import annotations

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError, ChildWorkflowError, WorkflowAlreadyStartedError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import JobResult
    from perdure.contract.names import SCHEDULED_JOB, TRAINING_JOB, job_workflow_id
    from perdure.spec.accepted import read_accepted


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
            return await workflow.execute_child_workflow(
                TRAINING_JOB,
                spec,
                result_type=JobResult,
                id=job_workflow_id(job.namespace, job.name),
                # An overlap policy that ends the schedule's earlier workflow means its job, whose nodes wind down.
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                static_summary=f"started by {workflow.info().workflow_id}",
            )
        except WorkflowAlreadyStartedError as error:
            raise ApplicationError(
                f'a job named "{job.name}" is already running in the namespace {job.namespace}',
                type="JobAlreadyRunning",
                non_retryable=True,
            ) from error
        except ChildWorkflowError as error:
            if isinstance(error.cause, ApplicationError):
                raise error.cause from error
            raise
