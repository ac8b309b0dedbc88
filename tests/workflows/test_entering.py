"""Tests of members that do not report entering their world: the job asks, through real groups and commands."""

from __future__ import annotations

from perdure.contract import FailureClass
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import incidents, node, running, seen, status

IMPATIENT = {
    "rendezvous": {"last_call": "200ms", "enter_timeout": "1s"},
    "commands": {"schedule_to_start": "2s"},
}


async def test_a_node_whose_command_does_not_run_and_that_says_nothing_is_started_again(fleet: Fleet):
    fleet.become_ready = False
    job = await submit(fleet, job_spec("2", timing=IMPATIENT))
    first, second = await node(fleet, job, 0), await node(fleet, job, 1)
    second.enters = False
    await first.ready()
    await second.ready()
    await running(job, nodes=2, generation=2)
    assert [world.generation for world in second.worlds] == [1, 1, 2]
    assert second.worlds[-1].members[1].restart_command
    [incident] = await incidents(job)
    assert (incident.failure, incident.culprit) == (FailureClass.RENDEZVOUS_TIMEOUT, 1)


async def test_who_has_entered_and_loads_a_large_model_is_asked_once_and_left_alone(fleet: Fleet):
    fleet.become_ready = False
    job = await submit(fleet, job_spec("2", timing=IMPATIENT))
    first, second = await node(fleet, job, 0), await node(fleet, job, 1)
    first.silent = second.silent = True
    await first.ready()
    await second.ready()
    await eventually(lambda: len(first.worlds) == len(second.worlds) == 2)
    assert not await incidents(job)
    await first.step()
    await second.step()
    await running(job, nodes=2, generation=1)
    assert (await status(job)).restarts == 0
    assert len(first.worlds) == len(second.worlds) == 2


async def test_an_agent_that_fails_on_each_command_while_its_lease_holds_is_reported_and_replaced(fleet: Fleet):
    # An attempt that no agent takes in time tells no error, not even the one of the attempt before.
    fast = IMPATIENT | {"commands": {"schedule_to_start": "3s", "start_to_close": "1s"}}
    fleet.become_ready = False
    job = await submit(fleet, job_spec("2", timing=fast | {"lease": {"heartbeat": "200ms", "timeout": "3s"}}))
    first, second = await node(fleet, job, 0), await node(fleet, job, 1)
    second.fails = "OSError: [Errno 5] Input/output error"
    await first.ready()
    await second.ready()

    async def blamed() -> bool:
        return any(one.failure is FailureClass.NODE_UNRESPONSIVE for one in await incidents(job))

    await seen(job, blamed)
    [incident] = await incidents(job)
    assert incident.culprit == 1
    assert any(second.fails in evidence.text for evidence in incident.evidence)
