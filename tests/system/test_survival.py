"""Tests of real ranks, torchruns, launchers, agents, nodes, workers and servers that are killed without warning."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys

import pytest

from perdure.base.errors import JobAlreadyRunning
from perdure.contract import FailureClass, JobPhase
from tests.support.waiting import eventually
from tests.system.site import WALK, Site

SHORT_LEASE = {"heartbeat": "500ms", "timeout": "3s", "schedule_to_start": "2s"}
"""Half of the default, so that what outlasts a lease need not last long."""


async def test_a_killed_rank_of_any_command_restarts_in_place_with_its_world_in_its_environment(site: Site):
    """Commands without torchrun: the one of each rank, which says what it finds, becomes a training."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    (out := site.folder / "out").mkdir()
    tell = f'echo {" ".join(f"${name}" for name in names)} > "env-$PERDURE_GENERATION-$RANK"'
    command = ["sh", "-c", f"{tell}; exec {shlex.join([sys.executable, str(WALK), str(out)])}"]
    job = await site.submit(command=command, nodes="2", out=out, network={"store_ports": "23000-23099"})
    await job.running(nodes=2)
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    await job.stepping(generation=2, ranks=2)
    (incident,) = await job.incidents()
    assert (incident.failure, incident.culprit) == (FailureClass.KILLED, 1)
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}
    job.finish()
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    for generation in (1, 2):
        seen = [(site.folder / f"env-{generation}-{rank}").read_text().split() for rank in range(2)]
        assert [row[:3] for row in seen] == [["0", "2", "0"], ["1", "2", "0"]]
        assert seen[0][3:] == seen[1][3:]
        assert int(seen[0][4]) in range(23000, 23100)


@pytest.mark.long("survival")
async def test_a_rank_killed_restarts_in_place(site: Site):
    job = await site.submit()
    await job.running(nodes=2)
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    (incident,) = await job.incidents()
    assert (incident.failure, incident.culprit) == (FailureClass.KILLED, 1)
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}
    await job.stepping(generation=2, ranks=2)


@pytest.mark.long("survival")
async def test_torchrun_killed_is_started_again_on_its_node(site: Site):
    job = await site.submit()
    await job.running(nodes=2)
    job.signal(0, "torchrun")
    await job.until(lambda s: s.phase is JobPhase.RUNNING and s.generation >= 2)
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}
    assert (await job.incidents())[0].culprit == 0


@pytest.mark.long("survival")
async def test_all_torchruns_killed_are_started_again_though_the_end_of_one_is_reported_after_the_next_world(
    site: Site,
):
    """`enter_timeout` is longer than this test waits."""
    job = await site.submit()
    await job.running(nodes=2)
    job.signal(1, "launcher", signal.SIGSTOP)
    for node in range(2):
        job.signal(node, "torchrun")
    await job.until(lambda s: s.generation >= 2)
    job.signal(1, "launcher", signal.SIGCONT)
    known = await job.running(nodes=2, after=1)
    await job.stepping(generation=known.generation, ranks=2)
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}
    assert FailureClass.RENDEZVOUS_TIMEOUT not in {incident.failure for incident in await job.incidents()}


@pytest.mark.long("survival")
async def test_a_launcher_killed_is_a_lost_node(site: Site):
    job = await site.submit()
    await job.running(nodes=2)
    job.signal(1, "launcher")
    await job.running(nodes=2, after=1)
    assert [node.incarnation for node in await site.client.nodes(job.name)] == [1, 2]


@pytest.mark.long("survival")
async def test_an_agent_killed_comes_back_unnoticed(site: Site):
    job = await site.submit(timing={"lease": SHORT_LEASE})
    await job.running(nodes=2)
    (agent,) = job.processes(1, kind="agent")
    job.signal(1, "agent")
    await job.undisturbed(ranks=2, seconds=5)
    (successor,) = job.processes(1, kind="agent")
    assert successor.pid != agent.pid
    # The new agent is in command of the old launcher.
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}


@pytest.mark.long("survival")
async def test_a_whole_node_killed_is_replaced(site: Site):
    job = await site.submit()
    await job.running(nodes=2)
    job.signal(0, None)
    await job.running(nodes=2, after=1)
    incident = (await job.incidents())[0]
    assert (incident.failure, incident.culprit) == (FailureClass.NODE_LOST, 0)


@pytest.mark.long("survival")
async def test_a_whole_node_killed_without_capacity_is_gone_on_without(own_site: Site):
    job = await own_site.submit(nodes="1:2", script=WALK)
    await job.running(nodes=2)
    (own_site.state.path / "capacity").write_text("1")
    job.signal(0, None)
    known = await job.running(nodes=1)
    await job.stepping(generation=known.generation, ranks=1)
    (own_site.state.path / "capacity").write_text("2")
    await job.running(nodes=2)


@pytest.mark.long("survival")
async def test_several_at_once(site: Site):
    job = await site.submit(nodes="1:3")
    await job.running(nodes=3)
    job.signal(0, "rank")
    job.signal(1, None)
    job.signal(2, "agent")
    await job.running(nodes=3, after=1)


@pytest.mark.long("survival")
async def test_a_frozen_agent_is_unreachable_and_back_and_nothing_is_restarted(site: Site):
    job = await site.submit(script=WALK, timing={"lease": SHORT_LEASE})
    await job.running(nodes=2)
    job.signal(1, "agent", signal.SIGSTOP)
    await job.until(lambda s: s.unreachable == (1,))
    await job.undisturbed(ranks=2, seconds=1)
    job.signal(1, "agent", signal.SIGCONT)
    known = await job.until(lambda s: not s.unreachable)
    assert (known.generation, known.phase) == (1, JobPhase.RUNNING)
    await job.undisturbed(ranks=2, seconds=2)
    assert not await job.incidents()


@pytest.mark.long("survival")
async def test_worker_and_server_killed_do_not_stop_training(own_site: Site):
    job = await own_site.submit(timing={"lease": SHORT_LEASE})
    await job.running(nodes=2)
    own_site.control_plane.kill_worker()
    own_site.control_plane.kill_server()
    await job.undisturbed(ranks=2, seconds=5)
    await own_site.control_plane.ensure()
    await job.undisturbed(ranks=2, seconds=4)
    known = await job.until(lambda s: not s.unreachable)
    assert known.generation == 1
    assert not await job.incidents()


@pytest.mark.long("survival")
async def test_a_rank_killed_while_the_server_is_away_is_repaired_when_it_is_back(own_site: Site):
    job = await own_site.submit()
    await job.running(nodes=2)
    own_site.control_plane.kill_server()
    job.signal(1, "rank")
    await asyncio.to_thread(lambda: [p.wait(30) for p in job.processes(1, kind="rank")])
    await own_site.control_plane.ensure()
    await job.running(nodes=2, after=1)
    assert {node.incarnation for node in await own_site.client.nodes(job.name)} == {1}


@pytest.mark.long("survival")
async def test_a_peer_killed_while_the_other_waits_in_the_exit_barrier(site: Site):
    job = await site.submit("--steps", "60", "--linger", "5")
    await eventually((job.out / "lingering-1").exists, what=lambda: "a rank in its final save")
    slow = next(n.rank for n in await site.client.nodes(job.name) if n.group_rank == 1)
    job.signal(slow, "rank")
    result = await site.client.wait(job.name)
    assert (result.phase, result.generations) == (JobPhase.SUCCEEDED, 2)


@pytest.mark.long("survival")
async def test_a_node_killed_while_a_world_is_handed_out(site: Site):
    job = await site.submit(nodes="1:3")
    await job.running(nodes=3)
    job.signal(2, "rank")
    await job.until(lambda s: s.generation >= 2)
    job.signal(1, None)
    await job.running(nodes=3, after=2)


@pytest.mark.long("survival")
async def test_a_script_that_fails_every_time_stops_with_its_error(site: Site):
    job = await site.submit("--fail-at", "3", script=WALK)
    result = await site.client.wait(job.name)
    assert (result.phase, result.exit_code) == (JobPhase.FAILED, 1)
    assert "no progress over 3 restarts" in result.reason
    assert "failing at step 3 as told" in (await job.incidents())[-1].log_tail + result.reason


@pytest.mark.long("survival")
async def test_a_command_that_does_not_exist_stops_at_once(site: Site):
    job = await site.submit(nodes="1", command=["trochrun", "train.py"])
    result = await site.client.wait(job.name)
    assert (result.phase, result.exit_code, result.restarts) == (JobPhase.FAILED, 1, 0)
    assert "trochrun" in result.reason


@pytest.mark.long("survival")
async def test_scale_suspend_and_resume(site: Site):
    job = await site.submit(nodes="3")
    await job.running(nodes=3)
    await site.client.scale(job.name, "2")
    known = await job.running(nodes=2)
    await job.stepping(generation=known.generation, ranks=2)
    await site.client.suspend(job.name)
    await job.until(lambda s: s.phase is JobPhase.SUSPENDED)
    await job.ended()
    await site.client.resume(job.name)
    known = await job.running(nodes=2, after=known.generation)
    await job.stepping(generation=known.generation, ranks=2)


@pytest.mark.long("survival")
async def test_cancel_leaves_no_process(site: Site):
    job = await site.submit()
    await job.running(nodes=2)
    with pytest.raises(JobAlreadyRunning):
        await site.client.submit(
            {"name": job.name, "workdir": {"path": "/"}, "roles": {"worker": {"nodes": 1, "command": ["true"]}}}
        )
    await site.client.cancel(job.name)
    result = await site.client.wait(job.name)
    assert result.phase is JobPhase.CANCELLED
    assert not job.processes()
