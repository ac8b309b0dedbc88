"""Tests of the Store workflow on a real server."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest
from temporalio.client import WorkflowHandle, WorkflowUpdateFailedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.contract import (
    DatasetNeeded,
    DatasetParameters,
    StoreAction,
    StoreAnswer,
    StoreAnswers,
    StoreCall,
    StoreNeeded,
    StoreRequest,
    StoreView,
)
from perdure.contract.names import dataset_workflow_id, store_workflow_id
from perdure.workflows.policy.diagnosis.claims import MOST_AHEAD_OF_SERVICE
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import RUN_ENDS, node, running, seen
from tests.workflows.played_node import PlayedNode
from tests.workflows.ways import REPLAYED, sandboxed

QUICK_END = {"owner_check": "200ms", "rendezvous": {"last_call": "200ms"}}


class Caller:
    """A rank that uses the store of its job through its node."""

    def __init__(self, fleet: Fleet, played: PlayedNode, *, name: str = "c", generation: int = 1) -> None:
        self.played = played
        self._name = name
        self._generation = generation
        self._sequence = count(1)
        self.store = fleet.client.get_workflow_handle(store_workflow_id(played.request.job_id, played.request.node.uid))

    def call(self, action: StoreAction, *keys: str, **fields: Any) -> StoreCall:
        return StoreCall(client=self._name, sequence=next(self._sequence), action=action, keys=keys, **fields)

    async def send(self, *calls: StoreCall, **changes: Any) -> tuple[StoreAnswer, ...]:
        """Sends calls, and again while the store is not there or its run has ended."""
        request = StoreRequest(sender=self.played.request.node, generation=self._generation, calls=calls)

        async def answers() -> StoreAnswers | None:
            try:
                changed = request.model_copy(update=changes)
                return await self.store.execute_update("call", changed, result_type=StoreAnswers)
            except RPCError as error:
                if error.status not in RUN_ENDS:
                    raise
                return None

        return (await eventually(answers)).calls

    async def ask(self, action: StoreAction, *keys: str, **fields: Any) -> StoreAnswer:
        (answer,) = await self.send(self.call(action, *keys, **fields))
        return answer

    async def wait(self, *keys: str) -> None:
        """Waits for keys as an agent does: asks again whenever its node is notified."""
        call = self.call(StoreAction.WAIT, *keys)
        while True:
            seen = self.played.store_changes
            (answer,) = await self.send(call)
            if not answer.waits:
                return
            await eventually(lambda seen=seen: self.played.store_changes > seen)


async def two_callers(fleet: Fleet, **spec: Any) -> tuple[WorkflowHandle[Any, Any], Caller, Caller]:
    handle = await submit(fleet, job_spec("2", **spec))
    await running(handle, nodes=2)
    nodes = [await node(fleet, handle, rank) for rank in range(2)]
    await nodes[0].to_group("store_needed", StoreNeeded)
    first, second = (Caller(fleet, played, name=f"c{played.rank}") for played in nodes)
    return handle, first, second


@pytest.mark.parametrize("fleet", [REPLAYED], indirect=True, ids=["replay of each task"])
async def test_a_node_that_waits_is_notified_and_the_store_ends_with_its_job(fleet: Fleet):
    handle, first, second = await two_callers(fleet, timing=QUICK_END)
    waiting = asyncio.create_task(second.wait("a", "b"))
    for key in ("a", "b"):
        assert not waiting.done()
        await first.ask(StoreAction.SET, key, values=(b"\x00\xff",))
    await asyncio.wait_for(waiting, 60)
    assert (await second.ask(StoreAction.GET, "b")).values == (b"\x00\xff",)
    assert (await first.store.query("usage", result_type=StoreView)).keys == 2
    await handle.cancel()
    result = await asyncio.wait_for(first.store.result(), 60)
    assert result["keys"] == 2


@sandboxed
async def test_a_node_that_is_away_is_notified_when_it_is_back(fleet: Fleet):
    _, first, second = await two_callers(fleet)
    waiting = asyncio.create_task(second.wait("a"))

    async def waits() -> bool:
        return (await first.store.query("usage", result_type=StoreView)).waiting_nodes == 1

    await first.ask(StoreAction.COUNT)
    await seen(first.store, waits)
    await second.played.die()
    await first.ask(StoreAction.SET, "a", values=(b"1",))
    assert not waiting.done()
    await second.played.serve()
    await asyncio.wait_for(waiting, 60)


async def test_what_it_cannot_read_and_what_a_stranger_sends_changes_nothing(fleet: Fleet):
    _, first, second = await two_callers(fleet)
    await first.ask(StoreAction.SET, "k", values=(b"1",))
    stranger = first.played.request.node.model_copy(update={"uid": "00000000"})
    with pytest.raises(WorkflowUpdateFailedError):
        await first.send(first.call(StoreAction.SET, "k", values=(b"2",)), sender=stranger)
    for malformed in ({"generation": 1}, {"generation": 1, "calls": [{"client": ""}]}, "text"):
        with pytest.raises(WorkflowUpdateFailedError):
            await first.store.execute_update("call", malformed)
    for made_up in (2 + MOST_AHEAD_OF_SERVICE, 2**60, 10**30):
        with pytest.raises(WorkflowUpdateFailedError) as refused:
            await first.send(first.call(StoreAction.SET, "k", values=(b"2",)), generation=made_up)
        assert "is not one of this job" in str(refused.value.cause)
    assert (await second.ask(StoreAction.GET, "k")).values == (b"1",)


async def test_a_group_starts_no_store_and_no_dataset_for_a_node_that_it_does_not_know(fleet: Fleet):
    handle = await submit(fleet, job_spec("1"))
    await running(handle, nodes=1)
    played = await node(fleet, handle, 0)
    caller = Caller(fleet, played)
    parameters = DatasetParameters(size=1, shard_size=1)
    guessed, known = (
        fleet.client.get_workflow_handle(dataset_workflow_id(handle.id, played.request.node.uid, name))
        for name in ("guessed", "known")
    )
    stranger = played.request.node.model_copy(update={"token": "guessed"})
    await played.to_group("store_needed", StoreNeeded, sender=stranger)
    await played.to_group("dataset_needed", DatasetNeeded, name="guessed", parameters=parameters, sender=stranger)
    # Signals are taken in order: when the group has taken this one, it has taken those before.
    await played.to_group("dataset_needed", DatasetNeeded, name="known", parameters=parameters)
    await eventually(lambda: _exists(known))
    assert not await _exists(guessed)
    assert not await _exists(caller.store)
    await played.to_group("store_needed", StoreNeeded)
    assert not (await caller.ask(StoreAction.SET, "k", values=(b"",))).refused


async def _exists(workflow: WorkflowHandle[Any, Any]) -> bool:
    try:
        return bool(await workflow.describe())
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return False
