"""Tests of `perdure join` on machines started by a scheduler: the machines are simulated, everything else is real."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from perdure.contract import FailureClass, JobPhase
from tests.support.allocation import REPOSITORY
from tests.support.command_line import PERDURE
from tests.support.exporting_worker import scrape
from tests.support.temporal_server import free_port
from tests.support.waiting import eventually
from tests.system.joined import Machines, Process
from tests.system.made_steps import steps
from tests.system.site import PATIENCE, SCRIPT, WALK, Job, Site

PROGRAMS = Path(__file__).with_name("role_programs.py")


async def submitted(site: Site, *arguments: str, nodes: str = "2", script: Path = WALK, **spec: Any) -> Job:
    return await site.submit(*arguments, nodes=nodes, script=script, backend="joined", **spec)


@pytest.mark.long("joining")
async def test_machines_train_print_and_end_with_the_job(site: Site, here: Machines):
    job = await submitted(site, "--steps", "40", script=SCRIPT)
    nodes = [here.join(job.name, name) for name in ("a", "b")]
    assert [await node.leave() for node in nodes] == [0, 0]
    result = await site.client.wait(job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 0)
    assert "SUCCEEDED: all 2 ranks finished in generation 1" in nodes[0].text
    assert not job.processes()


@pytest.mark.long("joining")
async def test_the_first_machine_starts_the_job_and_a_late_one_learns_that_it_is_over(site: Site, here: Machines):
    name = f"made-{uuid4().hex[:8]}"
    request = ("--nodes", "2", "--", "sh", "-c", "echo hello from $RANK of $WORLD_SIZE")
    nodes = [here.join(name, node_id, *request) for node_id in ("a", "b")]
    assert [await node.leave() for node in nodes] == [0, 0]
    assert sum("started the job" in node.text for node in nodes) == 1
    said = sorted(line for node in nodes for line in node.text.splitlines() if line.startswith("hello"))
    assert said == ["hello from 0 of 2", "hello from 1 of 2"]
    late = here.join(name, "c", *request)
    assert await late.leave() == 0
    assert "started the job" not in late.text
    kept = here.start(*PERDURE, "logs", name)
    assert await kept.leave() == 0
    assert sorted(line.partition(" | ")[2] for line in kept.text.splitlines()) == said


@pytest.mark.long("joining")
async def test_a_rank_killed_restarts_in_place(site: Site, here: Machines):
    job = await submitted(site, script=SCRIPT)
    for name in ("a", "b"):
        here.join(job.name, name)
    await job.running(nodes=2)
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    assert {node.incarnation for node in await site.client.nodes(job.name)} == {1}


@pytest.mark.long("joining")
async def test_a_launcher_killed_has_its_machine_ask_for_a_place_again(site: Site, here: Machines):
    job = await submitted(site)
    nodes = [here.join(job.name, name) for name in ("a", "b")]
    await job.running(nodes=2)
    job.signal(1, "launcher")
    await job.running(nodes=2, after=1)
    assert sorted(node.incarnation for node in await site.client.nodes(job.name)) == [1, 2]
    assert sum("requesting a place again" in node.text for node in nodes) == 1


@pytest.mark.long("joining")
async def test_an_agent_killed_comes_back_unnoticed(site: Site, here: Machines):
    job = await submitted(site)
    ports = {name: free_port() for name in ("a", "b")}
    for name, port in ports.items():
        here.join(job.name, name, "--metrics-port", str(port))
    await job.running(nodes=2)
    nodes = {await eventually(partial(served_node, port, job)) for port in ports.values()}
    assert nodes == {"0", "1"}
    job.signal(1, "agent")
    await job.undisturbed(ranks=2, seconds=4)
    assert not await job.incidents()
    # An agent that has come back has its port again.
    assert {await eventually(partial(served_node, port, job)) for port in ports.values()} == nodes


async def served_node(port: int, job: Job) -> str | None:
    """The rank of the node whose metrics are served at a port."""
    with suppress(OSError):
        for line in (await asyncio.to_thread(scrape, port)).splitlines():
            if line.startswith("perdure_node_step{") and f'job_name="{job.name}"' in line:
                return re.findall(r'node="(\d+)"', line)[0]
    return None


@pytest.mark.long("joining")
async def test_a_machine_killed_and_started_again_has_its_place_back(site: Site, here: Machines):
    job = await submitted(site)
    started = {name: here.join(job.name, name) for name in ("a", "b")}
    await job.running(nodes=2)
    lost = next(node for node in await site.client.nodes(job.name) if node.rank == 1)
    victim = next(name for name, process in started.items() if is_above(process, job, node=1))
    processes = psutil.Process(started[victim].popen.pid).children(recursive=True)
    for process in (started[victim].popen, *processes):
        # The launcher takes its own along.
        with suppress(psutil.NoSuchProcess):
            process.kill()
    here.join(job.name, victim)
    await job.running(nodes=2, after=1)
    (incident, *_) = await job.incidents()
    assert (incident.failure, incident.culprit) == (FailureClass.NODE_LOST, 1)
    back = next(node for node in await site.client.nodes(job.name) if node.rank == 1)
    assert (lost.incarnation, back.incarnation) == (1, 2)


def is_above(process: Process, job: Job, *, node: int) -> bool:
    (launcher,) = job.processes(node, kind="launcher")
    return launcher.ppid() == process.popen.pid


@pytest.mark.long("joining")
async def test_killing_the_command_ends_the_node_with_it(site: Site, here: Machines):
    job = await submitted(site, nodes="1")
    node = here.join(job.name, "a")
    await job.running(nodes=1)
    node.signal(signal.SIGKILL)
    await job.ended()


@pytest.mark.long("joining")
async def test_a_terminated_machine_reports_its_departure_and_another_takes_its_place(site: Site, here: Machines):
    job = await submitted(site, nodes="1:2")
    started = {name: here.join(job.name, name) for name in ("a", "b")}
    await job.running(nodes=2)
    leaving = next(process for process in started.values() if is_above(process, job, node=1))
    leaving.signal(signal.SIGTERM)
    assert await leaving.leave(within=30) == 128 + signal.SIGTERM
    known = await job.running(nodes=1)
    assert "perdure join" in known.next_action
    evidence = [found.text for incident in await job.incidents() for found in incident.evidence]
    assert any("got SIGTERM" in text for text in evidence), evidence
    here.join(job.name, "c")
    await job.running(nodes=2, after=known.generation)


@pytest.mark.long("joining")
async def test_a_terminated_machine_has_a_checkpoint_made_first(site: Site, here: Machines, tmp_path: Path):
    out, script = tmp_path / "out", REPOSITORY / "examples" / "04-checkpoints" / "plain.py"
    job = await site.submit(
        backend="joined",
        command=["torchrun", str(script), "--steps", "100000", "--out", str(out)],
        checkpoint={"storage": f"file://{tmp_path / 'storage'}", "every": 1_000_000},
        limits={"termination_grace_period": "60s"},
    )
    job.out = out
    started = [here.join(job.name, name) for name in ("a", "b")]
    await job.running(nodes=2)
    await eventually(lambda: steps(job, 0)[10:], within=PATIENCE)
    reached = steps(job, 0)[-1]
    leaving = next(process for process in started if is_above(process, job, node=1))
    leaving.signal(signal.SIGTERM)
    assert await leaving.leave() == 128 + signal.SIGTERM
    known = await job.status()
    assert (known.checkpoint.step or 0) > reached
    evidence = [found.text for incident in await job.incidents() for found in incident.evidence]
    assert any("perdure join" in text and "got SIGTERM" in text for text in evidence), evidence
    # Who is in a hurry signals twice.
    other = next(process for process in started if process is not leaving)
    other.signal(signal.SIGINT)
    other.signal(signal.SIGTERM)
    assert await other.leave() in (128 + signal.SIGINT, 128 + signal.SIGTERM)


@pytest.mark.long("joining")
async def test_a_scheduler_that_terminates_all_processes_of_a_machine_at_once_is_told_as_one_loss(
    site: Site, here: Machines
):
    job = await submitted(site, nodes="1:2", script=SCRIPT)
    started = [here.join(job.name, name) for name in ("a", "b")]
    await job.running(nodes=2)
    leaving = next(process for process in started if is_above(process, job, node=1))
    top = psutil.Process(leaving.popen.pid)
    for process in (top, *top.children(recursive=True)):
        process.terminate()
    assert await leaving.leave(within=30) == 128 + signal.SIGTERM
    await job.running(nodes=1, after=1)
    lost = [incident for incident in await job.incidents() if incident.failure]
    assert [(incident.failure, incident.culprit) for incident in lost] == [(FailureClass.DISRUPTED, 1)]
    assert any("got SIGTERM" in sign.text for sign in lost[0].evidence)


@pytest.mark.long("joining")
async def test_a_failed_script_is_every_machines_exit_code(site: Site, here: Machines):
    job = await submitted(site, "--fail-at", "3", retry={"max_restarts": 1})
    nodes = [here.join(job.name, name) for name in ("a", "b")]
    assert [await node.leave() for node in nodes] == [1, 1]
    assert "failing at step 3 as told" in nodes[0].text


@pytest.mark.long("joining")
async def test_a_machine_without_a_place_says_so_or_waits(site: Site, here: Machines):
    job = await submitted(site, nodes="1")
    node = here.join(job.name, "a")
    await job.running(nodes=1)
    surplus = here.join(job.name, "b")
    assert await surplus.leave() == 3
    assert "its only place is taken" in surplus.text
    spare = here.join(job.name, "c", "--wait")
    await eventually(lambda: "waiting: " in spare.text, what=lambda: f"a spare that waits, but {spare.text}")
    node.signal(signal.SIGTERM)
    await job.running(nodes=1, after=1)
    await site.client.cancel(job.name)
    assert await spare.leave() == 4


@pytest.mark.long("joining")
async def test_a_node_that_is_not_wanted_any_more_goes_home(site: Site, here: Machines):
    job = await submitted(site)
    nodes = [here.join(job.name, name) for name in ("a", "b")]
    await job.running(nodes=2)
    home = next(process for process in nodes if is_above(process, job, node=1))
    await site.client.scale(job.name, 1)
    assert await home.leave() == 0
    assert "continues without this machine" in home.text
    await job.running(nodes=1, after=1)


def job_of_roles(out: Path) -> dict[str, Any]:
    """The roles of a training on two machines, which a third one has prepared and then serves."""

    def program(name: str, **fields: Any) -> dict[str, Any]:
        return {"nodes": 1, "command": [sys.executable, str(PROGRAMS), name, str(out)], **fields}

    return {
        "trainer": {"nodes": 2, "command": ["torchrun", str(SCRIPT), str(out)], "depends_on": {"ps": "ready"}},
        "ps": program("serve", ready={"port": free_port()}, depends_on={"init": "completed"}),
        "init": program("prepare"),
    }


@pytest.mark.long("joining")
async def test_machines_join_the_roles_that_lack_nodes_and_the_loss_of_one_concerns_its_role(
    site: Site, here: Machines, tmp_path: Path
):
    out = tmp_path / "out"
    job = await submitted(site, out=out, roles=job_of_roles(out), recovery={"warm_starts": False})
    started = {name: here.join(job.name, name, "--wait") for name in "abc"}
    await job.stepping(generation=1, ranks=2)
    (first,) = [process for process in started.values() if f"{job.name}: init node 0 at" in process.text]
    assert "init node 0 is over: " in first.text
    server = next(process for process in started.values() if f"{job.name}: ps node 0 at" in process.text)
    surplus = here.join(job.name, "d")
    assert await surplus.leave() == 3
    assert "role ps: its only place is taken; role trainer: all its 2 places are taken" in surplus.text
    unknown = here.join(job.name, "d", "--role", "reward")
    assert await unknown.leave() == 2
    assert 'role: got "reward"; this job has the roles "trainer", "ps", "init"' in unknown.text

    server.signal(signal.SIGTERM)
    assert await server.leave() == 128 + signal.SIGTERM
    here.join(job.name, "e")
    expected = {"trainer": 1, "ps": 2, "init": 1}
    await job.until(
        lambda status: (
            {one.name: one.generation for one in status.by_role} == expected and status.phase is JobPhase.RUNNING
        )
    )
    job.finish()
    assert [await process.leave() for process in started.values() if process is not server] == [0, 0]
    assert (await site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    await job.ended()


@pytest.mark.long("joining")
async def test_what_is_wrong_is_said(site: Site, here: Machines):
    unknown = here.join("no-such-job", "a")
    assert await unknown.leave() == 2
    assert 'no job named "no-such-job"' in unknown.text
    local = await site.submit(nodes="1", script=WALK)
    refused = here.join(local.name, "a")
    assert await refused.leave() == 2
    assert "only jobs with backend: joined are joined" in refused.text
    job = await submitted(site, nodes="1")
    other = here.join(job.name, "a", "--", "torchrun", str(SCRIPT), "elsewhere")
    assert await other.leave() == 2
    assert "was started to run" in other.text
