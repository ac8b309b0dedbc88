"""Runs that end although something is in flight, before the server refuses their updates, or ends them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError

from perdure.contract import GroupTransitions, JobPhase, NodeEvent, NodeEventKind, NodeEvents, ScaleRequest
from perdure.workflows import options
from perdure.workflows.node_table import NodeTable
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import RUN_ENDS, continue_as_new, continued_as_new, node, reset, running, until
from tests.workflows.played_node import now

UPDATES = 20
BYTES = 200_000
LARGE = "x" * 20_000


@pytest.fixture
async def bounded(temporal_client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """A fleet whose runs have room for few updates, and for a few large messages."""
    monkeypatch.setattr(options, "UPDATES_LIMIT", UPDATES)
    monkeypatch.setattr(options, "HISTORY_BYTES", BYTES)
    async with running_fleet(temporal_client) as fleet:
        yield fleet


async def in_trouble(fleet: Fleet) -> WorkflowHandle[Any, Any]:
    """A job whose incident is open, as it waits for a node: nothing but a limit ends its run."""
    job = await submit(fleet, job_spec("2"))
    await running(job, nodes=2)
    fleet.pending[1] = "no machine"
    await fleet.lose(await node(fleet, job, 1))
    await until(job, lambda known: known.phase is JobPhase.WAITING)
    return fleet.client.get_workflow_handle(job.id)


async def recovers(fleet: Fleet, job: WorkflowHandle[Any, Any]) -> None:
    """The node comes, and trains with the other one."""
    await (await node(fleet, job, 1, 2)).start()
    known = await running(job, nodes=2)
    assert known.generation == 2


async def test_a_job_in_trouble_ends_its_run_before_the_server_refuses_its_updates(bounded: Fleet):
    job = await in_trouble(bounded)
    first_run = (await job.describe()).run_id

    async def asked() -> bool:
        try:
            await job.execute_update("scale", ScaleRequest(nodes="2"))
        except RPCError as error:
            if error.status not in RUN_ENDS:
                raise
            return False
        return True

    for _ in range(UPDATES + 1):
        await eventually(asked)
    await continued_as_new(job, first_run)
    await recovers(bounded, job)


async def test_a_job_in_trouble_ends_its_run_before_its_history_is_too_large(bounded: Fleet):
    job = await in_trouble(bounded)
    await continue_as_new(job, lambda: job.signal("transitions", GroupTransitions(uid=LARGE, group=0, sequence=1)))
    await recovers(bounded, job)


async def test_a_job_ends_its_run_although_a_group_that_it_adopts_sends_no_table(
    bounded: Fleet, monkeypatch: pytest.MonkeyPatch
):
    roles = {name: {"nodes": "1", "command": ["torchrun", "train.py"]} for name in ("worker", "server")}
    job = await submit(bounded, job_spec(roles=roles))
    await until(job, lambda known: [one.phase for one in known.by_role] == [JobPhase.RUNNING] * 2)
    nodes = set(bounded.nodes)
    with monkeypatch.context() as silent:
        silent.setattr(NodeTable, "adopt", lambda table, adopt: None)
        await reset(job)
        job = bounded.client.get_workflow_handle(job.id)
        large = GroupTransitions(uid=LARGE, group=0, sequence=1)
        await continue_as_new(job, lambda: job.signal("transitions", large))
    await until(job, lambda known: [one.phase for one in known.by_role] == [JobPhase.RUNNING] * 2, within=120)
    assert set(bounded.nodes) == nodes, "all nodes are known again, and none was made beside them"


async def test_a_group_ends_its_run_before_its_history_is_too_large(bounded: Fleet):
    job = await in_trouble(bounded)
    group = bounded.client.get_workflow_handle(bounded.node(job.id, 0).request.group_id)
    unknown = NodeEvent(rank=99, incarnation=1, kind=NodeEventKind.RUNNING, time=now(), reason=LARGE)
    await continue_as_new(group, lambda: group.signal("node_events", NodeEvents(events=(unknown,))))
    await recovers(bounded, job)
