"""Tests of a command that does not enter its node's world: a real agent detects it, a real launcher ends it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.activities.nodes.local.backend import LocalBackend
from perdure.spec.timing import RendezvousTiming
from tests.activities.local_nodes import LocalJob, nothing_left, run_at_once
from tests.agent.harness import QUICK, RunningAgent, Workflows, running_agent
from tests.agent.recorder import Call, Recorder
from tests.support.desired import Desires, desired_world
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually
from tests.support.warm_agents import warm_agents

IMPATIENT = QUICK.model_copy(update={"rendezvous": RendezvousTiming(enter_timeout=timedelta(seconds=1))})


@pytest.fixture
async def agent(
    temporal_server: DevServer, workflows: Workflows, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningAgent]:
    folder = tmp_path_factory.mktemp("n")
    async with running_agent(temporal_server, workflows, folder, timing=IMPATIENT) as running:
        await running.launcher_hello()
        yield running


async def attempt(agent: RunningAgent) -> int:
    return (await agent.get("/v1/launcher/desired?version=0&wait=0"))["attempt"]


async def test_it_is_told_once_and_the_command_is_started_again(agent: RunningAgent, workflows: Workflows) -> None:
    await agent.handler_hello()
    await agent.ready(0)
    await agent.desire(world=agent.world(1))
    [failure] = await workflows.expect(workflows.job, "failure")
    assert (failure["kind"], failure["generation"]) == ("RENDEZVOUS", 1)
    assert failure["message"].startswith("the command did not enter generation 1 within 1s: its rendezvous handler")
    assert await attempt(agent) == 1
    await agent.desire(world=agent.world(2, restart_command=True))
    assert await attempt(agent) == 2
    # The launcher ended it at our request, which is no failure; the new one is late as well.
    await agent.post("/v1/launcher/exited", attempt=1, generation=0, signal=15, time=time.time())
    _, again = await workflows.expect(workflows.job, "failure", count=2)
    assert (again["kind"], again["generation"]) == ("RENDEZVOUS", 2)
    assert "has not reached the rendezvous" in again["message"]
    assert await attempt(agent) == 2
    await agent.start_lease(1)
    await workflows.beats(3)
    assert len(await workflows.seen(workflows.job, "failure")) == 2


async def test_who_enters_in_time_is_left_alone(agent: RunningAgent, workflows: Workflows) -> None:
    await agent.handler_hello()
    await agent.ready(0)
    await agent.desire(world=agent.world(1))
    await agent.enter(1)
    await agent.start_lease(1)
    await workflows.beats(4)
    assert not await workflows.seen(workflows.job)
    # A word that crossed with the job's decision: what has entered needs no new start.
    await agent.desire(world=agent.world(2, restart_command=True))
    assert await attempt(agent) == 1


async def test_a_launcher_replaces_the_command(
    temporal_server: DevServer, workflows: Workflows, tmp_path_factory: pytest.TempPathFactory
) -> None:
    state, code = tmp_path_factory.mktemp("s"), tmp_path_factory.mktemp("code")
    # Its name says that nothing but torchrun is started: another script might do other work first.
    torchrun = code / "torchrun"
    torchrun.write_text("#!/bin/bash\ntrap '' TERM; echo $$ >> starts; while :; do sleep 1; done\n")
    torchrun.chmod(0o755)
    job = LocalJob(
        state,
        run_at_once(str(torchrun), "train.py"),
        workdir={"path": str(code)},
        timing=IMPATIENT.model_dump(mode="json"),
    )
    job.job_id, job.group_id = workflows.job.id, workflows.group.id
    job.job_first_run_id = workflows.job.first_execution_run_id or ""
    backend = LocalBackend(state, connection=temporal_server.environment)
    request = job.request()
    desires = Desires(request.node)

    async def apply(generation: int, *, restart: bool) -> None:
        world = desired_world(request.node, generation, restart_command=restart)
        command = desires.next(world=world)
        call = Call(queue=request.task_queue, activity="apply_desired", argument=command.model_dump(mode="json"))
        assert (await workflows.group.execute_update(Recorder.call, call))["accepted"]  # pyrefly: ignore[no-matching-overload]

    def starts() -> list[str]:
        path: Path = code / "starts"
        return path.read_text().split() if path.exists() else []

    with warm_agents():
        async with nothing_left(job):
            await backend.create(request)
            await eventually(starts)
            await apply(1, restart=False)
            [failure] = await workflows.expect(workflows.job, "failure")
            assert (failure["kind"], failure["generation"]) == ("RENDEZVOUS", 1)
            await apply(2, restart=True)
            first, second = await eventually(lambda: starts() if len(starts()) == 2 else None)
            assert int(second) in job.processes()
            assert int(first) not in job.processes()
