"""Tests of a job of eight roles on a real server, with simulated nodes."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.contract import GroupTransitions, JobPhase, JobStatus
from perdure.workflows import options
from tests.workflows.fleet import Fleet, job_spec, running_fleet, submit
from tests.workflows.jobs import continued_as_new, node, reset, status, until

SERVICES = ("ps", "reward", "rollout", "inference")
FOLLOWERS = ("evaluator", "dashboard")
LIMIT = 150
"""Events: a few times what a run of the job begins with."""


def eight_roles() -> dict[str, Any]:
    """An initializer, four services, a trainer, and two that may fail."""
    common = {"nodes": 1, "command": ["torchrun", "train.py"]}
    services = {
        name: {
            **common,
            "ready": {"port": 6000 + 100 * number},
            "depends_on": {"data": "completed"},
        }
        for number, name in enumerate(SERVICES)
    }
    trainer = {**common, "depends_on": dict.fromkeys(SERVICES, "ready")}
    followers = {name: {**common, "on_failure": "ignore"} for name in FOLLOWERS}
    return {"data": common, **services, "trainer": trainer, **followers}


def phases(known: JobStatus) -> dict[str, JobPhase]:
    return {role.name: role.phase for role in known.by_role}


def generations(known: JobStatus) -> dict[str, int]:
    return {role.name: role.generation for role in known.by_role}


def reason(known: JobStatus, name: str) -> str:
    return next(role.reason for role in known.by_role if role.name == name)


def all_work(known: JobStatus) -> bool:
    of = phases(known)
    return of.pop("data") is JobPhase.SUCCEEDED and set(of.values()) == {JobPhase.RUNNING}


async def started(fleet: Fleet) -> WorkflowHandle[Any, Any]:
    """A job whose initializer has ended, and whose other roles run."""
    handle = await submit(fleet, job_spec(roles=eight_roles()))
    first = await node(fleet, handle, 0, role="data")
    known = await until(handle, lambda s: phases(s)["data"] is JobPhase.RUNNING)
    waiting = {role.name for role in known.by_role if role.generation == 0}
    assert {*SERVICES, "trainer"} <= waiting, "they wait for the data"
    await first.finish()
    await until(handle, all_work, within=120)
    return fleet.client.get_workflow_handle(handle.id)


async def continue_as_new(handle: WorkflowHandle[Any, Any]) -> None:
    """Fills the history of the job, until it has another run."""
    run = (await handle.describe()).run_id
    for _ in range(LIMIT):
        await handle.signal("transitions", GroupTransitions(uid="of another job", group=0, sequence=1))
    await continued_as_new(handle, run)


def incarnations(fleet: Fleet, handle: WorkflowHandle[Any, Any]) -> dict[str, int]:
    """The number of nodes that were ever made, by role."""
    made: dict[str, int] = {}
    for key in fleet.nodes:
        role = key[0].removeprefix(f"{handle.id}/")
        made[role] = made.get(role, 0) + 1
    return made


@pytest.mark.long("workflows")
async def test_a_job_of_eight_roles_that_continues_as_new_again_and_again_repairs_one_of_them(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
):
    """Each task begins with a replay of the whole history."""
    monkeypatch.setattr(options, "HISTORY_LIMIT", LIMIT)
    async with running_fleet(temporal_client, max_cached_workflows=0) as fleet:
        handle = await started(fleet)
        fleet.become_ready = False
        await fleet.lose(await node(fleet, handle, 0, role="rollout"))
        replacement = await node(fleet, handle, 0, 2, role="rollout")
        before = await until(handle, lambda s: "has not reached the rendezvous" in reason(s, "rollout"))
        await continue_as_new(handle)
        after = await status(handle)
        assert after.by_role == before.by_role
        await replacement.ready()
        known = await until(handle, all_work)
        assert generations(known) == dict.fromkeys(phases(known), 1) | {"rollout": 2}
        assert incarnations(fleet, handle) == dict.fromkeys(phases(known), 1) | {"rollout": 2}
        await (await node(fleet, handle, 0, role="trainer")).finish()
        assert (await handle.result())["phase"] == "SUCCEEDED"
        assert len(fleet.deleted) == len(set(fleet.deleted)) == 9, "each node is removed, and none twice"


@pytest.mark.long("workflows")
async def test_a_job_of_roles_that_is_reset_adopts_all_their_nodes_and_starts_none_again(fleet: Fleet):
    handle = await started(fleet)
    removed = list(fleet.deleted)
    await reset(handle)
    known = await until(handle, lambda s: all_work(s) and generations(s)["data"] == 0)
    assert generations(known) == dict.fromkeys(phases(known), 2) | {"data": 0}
    assert fleet.deleted == removed
    assert set(incarnations(fleet, handle).values()) == {1}
    await (await node(fleet, handle, 0, role="trainer")).finish()
    assert (await handle.result())["phase"] == "SUCCEEDED"
    assert len(fleet.deleted) == len(set(fleet.deleted)) == 8
