"""A job that continues as new, and one that is reset: nothing that it knew is lost, and nothing is awaited in vain."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.contract import JobPhase
from perdure.workflows import options
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import continue_as_new, node, reset, running, status, tasks, until

LIMIT = 200
"""Events of a run: more than the start of a job makes. It is the same from the first event on, as it is where workers
run: a replay under another limit would make other commands."""


@pytest.fixture
async def brief(temporal_client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """A fleet whose runs are short."""
    monkeypatch.setattr(options, "HISTORY_LIMIT", LIMIT)
    async with running_fleet(temporal_client) as fleet:
        yield fleet


async def recovers(fleet: Fleet, job: WorkflowHandle[Any, Any], incarnation: int) -> None:
    """Node 1 is lost, and its next incarnation trains."""
    await fleet.lose(await node(fleet, job, 1, incarnation - 1))
    await node(fleet, job, 1, incarnation)
    known = await running(job, nodes=2)
    assert known.generation >= incarnation


@pytest.mark.long("workflows")
@pytest.mark.parametrize("reapply", [True, False], ids=["handed-its-signals", "forgetting-signals"])
async def test_a_later_run_that_is_reset_to_its_first_task_knows_its_nodes(brief: Fleet, reapply: bool):
    job = await submit(brief, job_spec("2"))
    job = brief.client.get_workflow_handle(job.id)
    await running(job, nodes=2)
    await continue_as_new(job)
    await recovers(brief, job, 2)
    await reset(job, reapply=reapply)
    await trains_on(brief, job)


@pytest.mark.long("workflows")
@pytest.mark.parametrize("reapply", [True, False], ids=["handed-its-signals", "forgetting-signals"])
async def test_a_run_that_is_reset_to_a_task_before_a_node_was_replaced_knows_the_new_node(fleet: Fleet, reapply: bool):
    job = await submit(fleet, job_spec("2"))
    job = fleet.client.get_workflow_handle(job.id)
    await running(job, nodes=2)
    before = (await tasks(job))[-1]
    await recovers(fleet, job, 2)
    await reset(job, to=before, reapply=reapply)
    await trains_on(fleet, job)


async def test_a_run_that_is_reset_to_its_last_task_trains_on_undisturbed(fleet: Fleet):
    job = await submit(fleet, job_spec("2"))
    job = fleet.client.get_workflow_handle(job.id)
    await running(job, nodes=2)
    last = (await tasks(job))[-1]
    await reset(job, to=last, reapply=False)

    async def has_the_table() -> bool:
        signals = [event async for event in job.fetch_history_events() if event.event_id > last]
        return any(event.HasField("workflow_execution_signaled_event_attributes") for event in signals)

    await eventually(has_the_table, what="the group sends its table")
    known = await running(job, nodes=2)
    assert (known.generation, known.restarts) == (1, 0)
    await recovers(fleet, job, 2)
    known = await status(job)
    assert (known.generation, known.restarts) == (2, 1)


async def trains_on(fleet: Fleet, job: WorkflowHandle[Any, Any]) -> None:
    """The job, in which one node was replaced, has kept its nodes and replaces one again."""
    await until(job, lambda s: s.phase is JobPhase.RUNNING and s.generation > 2)
    assert sorted(key[1:] for key in fleet.nodes if key[0] == job.id) == [(0, 1), (1, 1), (1, 2)]
    await recovers(fleet, job, 3)
