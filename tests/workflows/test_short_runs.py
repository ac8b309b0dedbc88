"""Tests of workflows whose runs end after a few events, as their server suggests: nothing is lost between two runs."""

from __future__ import annotations

import asyncio

from perdure.base.executions import update
from perdure.contract import (
    Accepted,
    FailureClass,
    GroupTransitions,
    JobPhase,
    ReasonRequest,
    ScaleRequest,
    StoreAction,
)
from perdure.contract.names import dataset_workflow_id
from perdure.workflows.policy.services.spans import size, union
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import continue_as_new, incidents, node, running, status, until
from tests.workflows.test_dataset import Reader, begin
from tests.workflows.test_store import Caller, two_callers


async def test_a_job_that_continues_as_new_forgets_nothing(fleet_of_short_runs: Fleet):
    fleet = fleet_of_short_runs
    handle = await submit(fleet, job_spec("1:2"))
    handle = fleet.client.get_workflow_handle(handle.id)
    generation, kills = (await running(handle, nodes=2)).generation, 2
    for rank in range(kills):
        await (await node(fleet, handle, rank)).rank_dies()
        generation += 1
        await running(handle, nodes=2, generation=generation)
    await continue_as_new(handle)
    failures = [incident.failure for incident in await incidents(handle) if incident.failure is not None]
    assert failures == [FailureClass.KILLED] * kills
    known = await status(handle)
    assert (known.restarts, known.generation) == (kills, generation)

    await (await node(fleet, handle, 1)).rank_dies()
    known = await running(handle, nodes=2, generation=generation + 1)
    assert known.restarts == kills + 1
    await handle.execute_update("scale", ScaleRequest(nodes="1"))
    await running(handle, nodes=1)
    assert (await node(fleet, handle, 0)).worlds[-1].nodes == 1
    await handle.execute_update("suspend", ReasonRequest())
    await until(handle, lambda s: s.phase is JobPhase.SUSPENDED)
    await handle.execute_update("resume", ReasonRequest())
    known = await running(handle, nodes=1)
    await (await node(fleet, handle, 0, incarnation=2)).finish()
    result = await handle.result()
    assert (result["phase"], result["generations"]) == ("SUCCEEDED", known.generation)


async def test_sums_are_exact_and_waits_are_answered_while_runs_end(fleet_of_short_runs: Fleet):
    _, first, second = await two_callers(fleet_of_short_runs)
    waiting = asyncio.create_task(second.wait("last"))
    callers = [Caller(fleet_of_short_runs, first.played, name=f"adds {number}") for number in range(4)]

    async def add(caller: Caller) -> None:
        for _ in range(6):
            once = caller.call(StoreAction.ADD, "n", amount=1)
            first_answer, repeated = await caller.send(once), await caller.send(once)
            assert first_answer == repeated

    await asyncio.gather(*map(add, callers))
    assert (await first.ask(StoreAction.GET, "n")).values == (b"24",)
    described = await first.store.describe()
    assert described.run_id != described.raw_description.workflow_execution_info.first_run_id, "continued as new"
    assert not waiting.done()
    await first.ask(StoreAction.SET, "last", values=(b"",))
    await asyncio.wait_for(waiting, 60)


async def test_no_lease_is_lost_or_given_twice_while_runs_end(fleet_of_short_runs: Fleet):
    fleet = fleet_of_short_runs
    handle = await submit(fleet, job_spec("2"))
    await running(handle, nodes=2)
    played = await node(fleet, handle, 0)
    await begin(handle, played)
    readers = [Reader(fleet, handle.id, played, rank) for rank in range(6)]
    await asyncio.gather(*(reader.read_all() for reader in readers))
    assert union(*(reader.consumed for reader in readers)) == ((0, 2000),)
    assert sum(size(reader.consumed) for reader in readers) == 2000
    name = dataset_workflow_id(handle.id, played.request.node.uid, "train")
    described = await fleet.client.get_workflow_handle(name).describe()
    first = described.raw_description.workflow_execution_info.first_run_id
    assert described.run_id != first, "it has continued as new"


async def test_users_requests_are_answered_while_runs_end(fleet_of_short_runs: Fleet):
    job = await submit(fleet_of_short_runs, job_spec("1"))
    job = fleet_of_short_runs.client.get_workflow_handle(job.id)
    await running(job, nodes=1)
    runs = set[str]()

    async def keep_busy() -> None:
        """Sends what changes nothing, and lets runs end at any moment."""
        while True:
            await job.signal("transitions", GroupTransitions(uid="of another job", group=0, sequence=1))
            runs.add((await job.describe()).run_id)

    async def ask() -> None:
        for _ in range(20):
            accepted = await update(job, "scale", result_type=Accepted, args=[ScaleRequest(nodes="1")])
            assert "changes to 1 node" in accepted.message

    busy = asyncio.create_task(keep_busy())
    await asyncio.gather(*(ask() for _ in range(4)))
    busy.cancel()
    assert len(runs) > 1, "it has continued as new"
