"""Tests of the Dataset workflow on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio import activity, workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.contract import (
    DatasetAnswer,
    DatasetNeeded,
    DatasetParameters,
    DatasetRequest,
    DatasetView,
    FailedShard,
    JobPhase,
    JobResult,
    JobStatus,
    NodeCredentials,
    ShardAnswer,
    ShardRequest,
    ShardsSetAside,
    Term,
    UnreadableDataset,
)
from perdure.contract.datasets import Spans
from perdure.contract.names import dataset_workflow_id, watch_task_queue
from perdure.workflows import options
from perdure.workflows.companion import JobOwner
from perdure.workflows.dataset import Dataset, DatasetInput
from perdure.workflows.policy.services import dataset_views, datasets, failed_shards
from perdure.workflows.policy.services.dataset_views import MOST_NAMED
from perdure.workflows.policy.services.datasets import DatasetState
from perdure.workflows.policy.services.failed_shards import MOST_TRIES
from perdure.workflows.policy.services.spans import difference, size, union
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import RUN_ENDS, node, running, seen, until
from tests.workflows.played_node import PlayedNode, now
from tests.workflows.ways import REPLAYED, sandboxed

PARAMETERS = DatasetParameters(size=1000, shard_size=10, epochs=2)
QUICK_END = {"owner_check": "200ms", "rendezvous": {"last_call": "200ms"}}


class Reader:
    """A rank that reads a dataset through its node."""

    def __init__(self, fleet: Fleet, job_id: str, played: PlayedNode, rank: int, generation: int = 1) -> None:
        self._played = played
        self._rank = rank
        self._term = Term(generation=generation)
        self._dataset = fleet.client.get_workflow_handle(dataset_workflow_id(job_id, played.request.node.uid, "train"))
        self.holds: Spans = ()
        self.consumed: Spans = ()

    async def exchange(
        self, *, shards: int = 0, done: Spans = (), failed: tuple[FailedShard, ...] = (), **changes: Any
    ) -> ShardAnswer:
        """Sends one request, and again when its run of the workflow ended before it was handled."""
        self.holds = difference(self.holds, union(done, [one.span for one in failed]))
        one = ShardRequest(rank=self._rank, world_size=2, holds=self.holds, done=done, failed=failed, shards=shards)
        request = DatasetRequest(
            sender=self._played.request.node, parameters=PARAMETERS, term=self._term, ranks=(one,)
        ).model_copy(update=changes)

        async def answer() -> DatasetAnswer | None:
            try:
                return await self._dataset.execute_update("exchange", request, result_type=DatasetAnswer)
            except RPCError as error:
                if error.status not in RUN_ENDS:
                    raise
                return None

        (given,) = (await eventually(answer)).ranks
        self.holds = union(self.holds, given.granted)
        return given

    async def read_all(self) -> None:
        """Reads until nothing is left to lease."""
        while True:
            answer = await self.exchange(shards=8, done=self.holds)
            self.consumed = union(self.consumed, self.holds)
            if answer.drained:
                return


async def begin(handle: WorkflowHandle[Any, Any], played: PlayedNode) -> None:
    await played.to_group("dataset_needed", DatasetNeeded, name="train", parameters=PARAMETERS)


@pytest.mark.long("workflows")
@pytest.mark.parametrize("fleet", [REPLAYED], indirect=True, ids=["replay of each task"])
async def test_ranks_of_two_nodes_read_every_sample_once_and_the_dataset_ends_with_its_job(fleet: Fleet):
    handle = await submit(fleet, job_spec("2", timing=QUICK_END))
    await running(handle, nodes=2)
    nodes = [await node(fleet, handle, rank) for rank in range(2)]
    await asyncio.gather(*(begin(handle, played) for played in nodes))
    readers = [Reader(fleet, handle.id, played, played.rank) for played in nodes]
    await asyncio.gather(*(reader.read_all() for reader in readers))
    assert union(*(reader.consumed for reader in readers)) == ((0, 2000),)
    assert sum(size(reader.consumed) for reader in readers) == 2000
    dataset = fleet.client.get_workflow_handle(dataset_workflow_id(handle.id, nodes[0].request.node.uid, "train"))
    assert (await dataset.query("progress", result_type=DatasetView)).done == 2000
    await handle.cancel()
    result = await asyncio.wait_for(dataset.result(), 60)
    assert result["done"] == 2000


@sandboxed
async def test_the_next_world_gets_what_a_lost_node_had_leased(fleet: Fleet):
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    nodes = [await node(fleet, handle, rank) for rank in range(2)]
    await begin(handle, nodes[0])
    lost, survivor = (Reader(fleet, handle.id, played, played.rank) for played in nodes)
    await lost.exchange(shards=5)
    await survivor.read_all()
    again = Reader(fleet, handle.id, nodes[1], 1, generation=2)
    await again.read_all()
    assert again.consumed == lost.holds
    assert (await lost.exchange(shards=1, done=lost.holds)).superseded


async def test_a_role_is_refused_the_dataset_of_another_one(fleet: Fleet):
    role = {"nodes": 1, "command": ["torchrun", "train.py"]}
    handle = await submit(fleet, job_spec(roles={"trainer": role, "evaluator": role}))
    await until(handle, lambda s: {one.phase for one in s.by_role} == {JobPhase.RUNNING})
    trainer, evaluator = [await node(fleet, handle, 0, role=name) for name in ("trainer", "evaluator")]
    await begin(handle, trainer)
    reader = Reader(fleet, handle.id, trainer, 0)
    given = await reader.exchange(shards=5)
    await begin(handle, evaluator)
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await Reader(fleet, handle.id, evaluator, 0).exchange(shards=5)
    assert "the dataset train is read by the role trainer" in str(refused.value.cause)
    assert "such as train-evaluator" in str(refused.value.cause)
    assert not (await reader.exchange()).granted
    assert reader.holds == given.granted


async def test_a_job_names_shards_that_were_set_aside_in_its_status_and_its_result(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    # Nothing else is done meanwhile, and each try counts at once.
    monkeypatch.setattr(failed_shards, "LONGEST_OUTAGE", timedelta())
    monkeypatch.setattr(failed_shards, "PAUSES", (timedelta(),))
    handle = await submit(fleet, job_spec("1", timing=QUICK_END))
    await running(handle, nodes=1)
    played = await node(fleet, handle, 0)
    await begin(handle, played)
    reader = Reader(fleet, handle.id, played, 0)
    failed: tuple[FailedShard, ...] = ()
    for _ in range(MOST_TRIES * (MOST_NAMED + 2)):
        (first, end), *_ = (await reader.exchange(shards=1, failed=failed)).granted
        failed = (FailedShard(span=(first, end), error=f"OSError: no block {first}"),)
    await reader.exchange(failed=failed)

    async def named() -> JobStatus | None:
        known = await handle.query("status", result_type=JobStatus)
        return known if known.unprocessed and len(known.unprocessed[0].shards) == MOST_NAMED else None

    status = await seen(handle, named)
    (warning,) = status.warnings
    assert "dataset train" in warning
    assert "epoch 0, 0 to 9 (OSError: no block 0)" in warning
    # A dataset with many shards set aside tells its job of further ones from time to time.
    await played.finish()
    result = JobResult.model_validate(await handle.result())
    (unprocessed,) = result.unprocessed
    assert unprocessed.shards == status.unprocessed[0].shards
    assert unprocessed.samples >= MOST_NAMED * PARAMETERS.shard_size


async def test_a_job_tells_that_a_dataset_cannot_be_read_until_it_can_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dataset_views, "UNREADABLE_AFTER", timedelta())
    for room in (datasets, dataset_views):
        monkeypatch.setattr(room, "MOST_IN_VAIN", 1)
    handle = await submit(fleet, job_spec("1", timing=QUICK_END))
    await running(handle, nodes=1)
    played = await node(fleet, handle, 0)
    await begin(handle, played)
    reader = Reader(fleet, handle.id, played, 0)

    async def warnings() -> tuple[str, ...]:
        return (await handle.query("status", result_type=JobStatus)).warnings

    [(first, end)] = (await reader.exchange(shards=2)).granted
    half = (first + end) // 2
    stale = (FailedShard(span=span, error="OSError: stale handle") for span in ((first, half), (half, end)))
    await reader.exchange(failed=tuple(stale))
    [warning] = await seen(handle, warnings)
    assert "nothing of dataset train could be read since" in warning
    assert "OSError: stale handle" in warning

    async def is_over() -> bool:
        return not await warnings()

    monkeypatch.setattr(failed_shards, "PAUSES", (timedelta(),))
    granted = (await reader.exchange(shards=1)).granted
    await reader.exchange(done=granted)
    await seen(handle, is_over)
    await played.finish()
    assert JobResult.model_validate(await handle.result()).unprocessed == ()


async def test_what_it_cannot_read_and_what_a_stranger_sends_changes_nothing(fleet: Fleet):
    handle = await submit(fleet, job_spec("1"))
    await running(handle, nodes=1)
    played = await node(fleet, handle, 0)
    await begin(handle, played)
    reader = Reader(fleet, handle.id, played, 0)
    await reader.exchange(shards=1)
    stranger = played.request.node.model_copy(update={"uid": "00000000"})
    with pytest.raises(WorkflowUpdateFailedError):
        await reader.exchange(shards=1, sender=stranger)
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await reader.exchange(shards=1, term=Term(generation=2**60))
    assert "is not one of this job" in str(refused.value.cause)
    name = dataset_workflow_id(handle.id, played.request.node.uid, "train")
    for malformed in ({"term": 1}, {"ranks": [{"rank": -1}]}, "text"):
        with pytest.raises(WorkflowUpdateFailedError):
            await fleet.client.get_workflow_handle(name).execute_update("exchange", malformed)
    held = reader.holds
    answer = await reader.exchange(shards=2)
    assert held == ((0, 10),)
    assert answer.granted == ((10, 30),)


@workflow.defn
class LateJob:
    """A job that is there only after its dataset has reported to it once in vain."""

    def __init__(self) -> None:
        self._received: ShardsSetAside | None = None

    @workflow.signal
    def shards_set_aside(self, message: ShardsSetAside) -> None:
        self._received = message

    @workflow.run
    async def run(self) -> ShardsSetAside | None:
        await workflow.wait_condition(lambda: self._received is not None)
        return self._received


@activity.defn(name="wait_for_job_end")
async def never_ends(owner: JobOwner) -> None:
    await asyncio.Event().wait()


async def test_a_report_that_the_job_did_not_receive_is_sent_again(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(options, "UNPROCESSED_INTERVAL", timedelta(milliseconds=300))
    queue, job = f"late-{uuid4().hex}", f"job/late/{uuid4().hex}"
    owner = JobOwner(job_id=job, job_first_run_id="", check=timedelta(seconds=1))
    state = DatasetState(parameters=PARAMETERS, next=10, aside=((0, 10),))
    dataset = DatasetInput(owner=owner, uid="0a1b2c3d", name="train", state=state)
    runner = UnsandboxedWorkflowRunner()
    async with (
        Worker(temporal_client, task_queue=queue, workflows=[Dataset, LateJob], workflow_runner=runner),
        Worker(temporal_client, task_queue=watch_task_queue(queue), activities=[never_ends]),
    ):
        handle = await temporal_client.start_workflow(
            Dataset.run, dataset, id=f"{job}/0a1b2c3d/dataset/train", task_queue=queue
        )

        async def has_failed() -> bool:
            kind = EventType.EVENT_TYPE_SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_FAILED
            return any([event.event_type == kind async for event in handle.fetch_history_events()])

        await eventually(has_failed)
        received = await temporal_client.execute_workflow(LateJob.run, id=job, task_queue=queue)
        assert received is not None
        assert received.unprocessed.samples == 10
        await handle.terminate()


def unattended(**changes: Any) -> DatasetInput:
    """A dataset of a job that the server does not know."""
    owner = JobOwner(job_id=f"job/late/{uuid4().hex}", job_first_run_id="", check=timedelta(seconds=1))
    state = datasets.begin(PARAMETERS)
    return DatasetInput(owner=owner, uid="0a1b2c3d", name="train", state=state).replace(**changes)


def request_of(rank: int) -> DatasetRequest:
    sender = NodeCredentials(uid="0a1b2c3d", role="worker", rank=0, incarnation=1, token="t")
    ranks = (ShardRequest(rank=rank, world_size=1, shards=1),)
    return DatasetRequest(sender=sender, parameters=PARAMETERS, term=Term(generation=1), ranks=ranks)


@asynccontextmanager
async def serving(client: Client, dataset: DatasetInput) -> AsyncGenerator[WorkflowHandle[Any, Any]]:
    """Runs a dataset by itself."""
    queue = f"alone-{uuid4().hex}"
    async with (
        Worker(client, task_queue=queue, workflows=[Dataset], workflow_runner=UnsandboxedWorkflowRunner()),
        Worker(client, task_queue=watch_task_queue(queue), activities=[never_ends]),
    ):
        handle = await client.start_workflow(
            Dataset.run, dataset, id=f"{dataset.owner.job_id}/0a1b2c3d/dataset/train", task_queue=queue
        )
        yield handle
        await handle.terminate()


async def test_a_job_that_is_gone_is_told_seldom_that_a_dataset_can_be_read_again(temporal_client: Client):
    away = UnreadableDataset(dataset="train", since=now(), error="OSError: stale handle")
    asked = EventType.EVENT_TYPE_SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED
    waited = EventType.EVENT_TYPE_TIMER_STARTED
    async with serving(temporal_client, unattended(unreadable=away)) as handle:
        await handle.execute_update("exchange", request_of(0), result_type=DatasetAnswer)

        async def first_two() -> list[str] | None:
            kinds = [event.event_type async for event in handle.fetch_history_events()]
            found = [EventType.Name(kind) for kind in kinds if kind in (asked, waited)]
            return found[:2] if len(found) > 1 else None

        assert await eventually(first_two) == [EventType.Name(asked), EventType.Name(waited)]


async def test_a_request_that_cannot_be_decided_on_is_refused_and_others_are_answered(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
):
    decide = datasets.exchange_all

    def fails_for_rank_7(state: DatasetState, request: DatasetRequest, **options: Any) -> Any:
        if request.ranks[0].rank == 7:
            raise ValueError("no span of positions")
        return decide(state, request, **options)

    monkeypatch.setattr("perdure.workflows.dataset.exchange_all", fails_for_rank_7)
    async with serving(temporal_client, unattended()) as handle:
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await handle.execute_update("exchange", request_of(7), result_type=DatasetAnswer)
        assert "this release cannot decide on the request: ValueError: no span" in str(refused.value.cause)
        answer = await handle.execute_update("exchange", request_of(0), result_type=DatasetAnswer)
        assert answer.ranks[0].granted == ((0, 10),)
