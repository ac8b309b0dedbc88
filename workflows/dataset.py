"""Dataset: leases the shards of one dataset to the ranks of a job, over its epochs.

Its state is a few spans, whatever the number of samples (`perdure.workflows.policy.services.datasets`). Agents exchange
by one update what their ranks have done for what they need next; the ranks hold shards ahead, so that they wait for
nothing while the workflow or the server is away.

Invariants:
    - All state is set in `__init__` and changed by the update without awaiting, so no request is lost or taken twice
      when a run ends. A request that was repeated gets the same leases.
    - It outlives the group that started it. It ends when its job has ended: until then a restored checkpoint may need
      samples again that are done.
"""

from __future__ import annotations

import asyncio

from temporalio import workflow
from temporalio.exceptions import ApplicationError, TemporalError

with workflow.unsafe.imports_passed_through():
    from perdure.contract import (
        DatasetAnswer,
        DatasetNeeded,
        DatasetRequest,
        DatasetView,
        Message,
        ShardsSetAside,
        UnreadableDataset,
    )
    from perdure.contract.names import DATASET, dataset_workflow_id
    from perdure.workflows import event_sink, options
    from perdure.workflows.carrying import Packed, pack, unpack
    from perdure.workflows.companion import JobOwner, accompany, owner_of, refusal_of, start_companion
    from perdure.workflows.node_record import GroupInput
    from perdure.workflows.patching import bounds_grants, keeps_what_is_done, spaces_tries
    from perdure.workflows.policy.diagnosis.claims import why_beyond
    from perdure.workflows.policy.services.dataset_views import unprocessed, unreadable, view
    from perdure.workflows.policy.services.datasets import MOST_NAMED, DatasetState, begin, exchange_all
    from perdure.workflows.policy.services.spans import size


class DatasetInput(Message):
    """The argument of a Dataset."""

    owner: JobOwner
    uid: str
    name: str
    role: str = ""
    """The role that reads it; empty for a dataset that an earlier release has started, which any may."""
    state: DatasetState
    reported: int = 0
    """The samples set aside that the job knows of."""
    unreadable: UnreadableDataset | None = None
    """What the job knows."""


@workflow.defn(name=DATASET)
class Dataset:
    """The workflow of one dataset; see the module."""

    @workflow.init
    def __init__(self, dataset: DatasetInput | Packed) -> None:
        self._input = unpack(dataset, DatasetInput)
        self._state = self._input.state
        self._reported = self._input.reported
        self._unreadable = self._known_unreadable = self._input.unreadable
        self._bounded = bounds_grants()
        self._spaced = spaces_tries()
        self._stays_done = keeps_what_is_done()

    @workflow.run
    async def run(self, dataset: DatasetInput | Packed) -> DatasetView:
        reporting = asyncio.create_task(self._report_to_job())
        ended = await accompany(self._input.owner)
        reporting.cancel()
        if not ended:
            known = self._known_unreadable
            workflow.continue_as_new(
                pack(self._input.replace(state=self._state, reported=self._reported, unreadable=known))
            )
        return view(self._state)

    @workflow.update(description="What ranks have done, for what they need next")
    def exchange(self, request: DatasetRequest) -> DatasetAnswer:
        try:
            self._state, answers = exchange_all(
                self._state,
                request,
                bounded=self._bounded,
                stays_done=self._stays_done,
                now=workflow.now() if self._spaced else None,
            )
        except Exception as error:
            raise refusal_of(error) from error
        if self._spaced:
            ranks = max((one.world_size for one in request.ranks), default=1)
            self._unreadable = unreadable(self._state, self._input.name, ranks=ranks, now=workflow.now())
        if not workflow.unsafe.is_replaying():
            event_sink.send_dataset(self._input.owner.job_id, self._input.name, self._state)
        return DatasetAnswer(ranks=answers)

    @exchange.validator
    def _validate_exchange(self, request: DatasetRequest) -> None:
        if request.sender.uid != self._input.uid:
            raise ApplicationError("the sender is not a node of this job")
        if refused := self._why_of_another_role(request.sender.role):
            raise ApplicationError(refused)
        if refused := why_beyond(request.term.generation, newest=self._state.term.generation):
            raise ApplicationError(refused)

    def _why_of_another_role(self, role: str) -> str:
        """Why nodes of a role are refused; empty where they are not. Ranks of two roles have the same numbers, and
        their worlds others: each would be given what the other one has."""
        name, reads = self._input.name, self._input.role
        if reads in ("", role):
            return ""
        return (
            f"the dataset {name} is read by the role {reads}, and a dataset belongs to one role: give that of the role "
            f"{role} another name, such as {name}-{role}"
        )

    @workflow.query(description="What is done, leased and set aside")
    def progress(self) -> DatasetView:
        return view(self._state)

    @property
    def _is_news(self) -> bool:
        """It cannot be read any more, or it can again."""
        return (self._unreadable is None) != (self._known_unreadable is None)

    async def _report_to_job(self) -> None:
        """Reports to the job what was set aside, all of it each time, until the job has received it.

        The job does not signal datasets, so that a signal by command locks nothing that waits for this workflow.
        """
        job = workflow.get_external_workflow_handle(self._input.owner.job_id)
        while True:
            await workflow.wait_condition(lambda: size(self._state.aside) != self._reported or self._is_news)
            known, away = unprocessed(self._state, self._input.name), self._unreadable
            received = False
            try:
                report = ShardsSetAside(uid=self._input.uid, unprocessed=known, unreadable=away)
                await job.signal("shards_set_aside", report)
                self._reported, self._known_unreadable = known.samples, away
                received = True
            except TemporalError as error:
                workflow.logger.warning("the job has not received what was set aside, and is sent it again: %s", error)
            waits = not received if self._spaced else self._reported != known.samples
            if waits or len(self._state.details) > MOST_NAMED:
                await workflow.sleep(options.UNPROCESSED_INTERVAL, summary="until the next report to the job")


async def start_dataset(group: GroupInput, needed: DatasetNeeded) -> None:
    """Starts the workflow of a dataset on behalf of a group; does nothing where it runs already."""
    await start_companion(
        DATASET,
        DatasetInput(
            owner=owner_of(group), uid=group.uid, name=needed.name, role=group.role, state=begin(needed.parameters)
        ),
        owner=owner_of(group),
        workflow_id=dataset_workflow_id(group.job_id, group.uid, needed.name),
        summary=f"dataset {needed.name} of {group.job_id}",
    )
