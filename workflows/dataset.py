"""Dataset: leases the shards of one dataset to the ranks of a job, over its epochs.

Its state is a few spans, whatever the number of samples (`workflows.policy.datasets`). Agents exchange by one update
what their ranks have done for what they need next; the ranks hold shards ahead, so that they wait for nothing while
the workflow or the server is away.

Invariants:
    - All state is set in `__init__` and changed by the update without awaiting, so no request is lost or taken twice
      when a run ends. A request that was repeated gets the same leases.
    - It outlives the group that started it. It ends when its job has ended: until then a restored checkpoint may need
      samples again that are done.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ActivityError, ApplicationError, WorkflowAlreadyStartedError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from workflows import options
    from workflows.carrying import Packed, pack, unpack
    from workflows.messages import DatasetAnswer, DatasetNeeded, DatasetRequest, DatasetView, Message, ShardAnswer
    from workflows.names import DATASET, dataset_workflow_id, watch_task_queue
    from workflows.node_record import GroupInput
    from workflows.policy.datasets import DatasetState, exchange, view


class JobOwner(Message):
    """The job whose end ends a dataset; argument of `wait_for_job_end`."""

    job_id: str
    job_first_run_id: str
    check: timedelta
    """The time between two looks."""


class DatasetInput(Message):
    """The argument of a Dataset."""

    owner: JobOwner
    uid: str
    name: str
    state: DatasetState


@workflow.defn(name=DATASET)
class Dataset:
    """The workflow of one dataset; see the module."""

    @workflow.init
    def __init__(self, dataset: DatasetInput | Packed) -> None:
        self._input = unpack(dataset, DatasetInput)
        self._state = self._input.state
        self._owner_ended = False

    @workflow.run
    async def run(self, dataset: DatasetInput | Packed) -> DatasetView:
        watch = asyncio.create_task(self._wait_for_owner())
        await workflow.wait_condition(lambda: self._owner_ended or self._may_continue())
        if not self._owner_ended:
            watch.cancel()
            await workflow.wait_condition(workflow.all_handlers_finished)
            workflow.continue_as_new(pack(self._input.model_copy(update={"state": self._state})))
        await workflow.wait_condition(workflow.all_handlers_finished)
        return view(self._state)

    @workflow.update(description="What ranks have done, for what they need next")
    def exchange(self, request: DatasetRequest) -> DatasetAnswer:
        answers: list[ShardAnswer] = []
        for one in request.ranks:
            self._state, answer = exchange(self._state, request.parameters, request.term, one)
            answers.append(answer)
        return DatasetAnswer(ranks=tuple(answers))

    @exchange.validator
    def _validate_exchange(self, request: DatasetRequest) -> None:
        if request.sender.uid != self._input.uid:
            raise ApplicationError("the sender is no node of this job")

    @workflow.query(description="What is done, leased and set aside")
    def progress(self) -> DatasetView:
        return view(self._state)

    async def _wait_for_owner(self) -> None:
        owner = self._input.owner
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
            if is_cancelled_exception(error):
                return
            raise
        self._owner_ended = True

    def _may_continue(self) -> bool:
        info = workflow.info()
        return info.is_continue_as_new_suggested() or info.get_current_history_length() > options.HISTORY_LIMIT


async def start_dataset(group: GroupInput, needed: DatasetNeeded) -> None:
    """Starts the workflow of a dataset on behalf of a group; does nothing where it runs already.

    A dataset that has completed belongs to a job that has ended, so it is not started again; one that was terminated
    begins anew.
    """
    owner = JobOwner(job_id=group.job_id, job_first_run_id=group.job_first_run_id, check=group.spec.timing.owner_check)
    begin = DatasetInput(owner=owner, uid=group.uid, name=needed.name, state=DatasetState(parameters=needed.parameters))
    try:
        await workflow.start_child_workflow(
            DATASET,
            begin,
            id=dataset_workflow_id(group.job_id, group.uid, needed.name),
            parent_close_policy=workflow.ParentClosePolicy.ABANDON,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE_FAILED_ONLY,
            static_summary=f"dataset {needed.name} of {group.job_id}",
        )
    except WorkflowAlreadyStartedError:
        workflow.logger.info("the dataset %s is already known", needed.name)
