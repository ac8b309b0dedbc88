"""Tests of a node that is stopped: agent, launcher and command are real, its group is simulated."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest

from perdure.activities.nodes.local.backend import LocalBackend
from perdure.activities.nodes.local.folders import NodeFolder
from perdure.contract import ApplyDesired, NodeDesired, StopRequest
from tests.activities.local_nodes import LocalJob, nothing_left, run_at_once
from tests.agent.harness import QUICK, recording
from tests.agent.recorder import Call, Recorder, Seen
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually
from tests.support.warm_agents import warm_agents

SAVES_SLOWLY = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saving").touch()
    time.sleep(float(sys.argv[1]))
    pathlib.Path("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("started").touch()
while True:
    time.sleep(60)
"""


class StoppableNode:
    """One node whose command takes so many seconds to save after SIGTERM."""

    def __init__(self, server: DevServer, state: Path, code: Path, *, saving_takes: float, grace: str) -> None:
        (code / "train.py").write_text(SAVES_SLOWLY)
        self.code = code
        self.job = LocalJob(
            state,
            run_at_once(sys.executable, "train.py", str(saving_takes)),
            workdir={"path": str(code)},
            limits={"termination_grace_period": grace},
            timing=QUICK.model_dump(mode="json"),
        )
        self._backend = LocalBackend(state, connection=server.environment)

    @asynccontextmanager
    async def running(self, server: DevServer) -> AsyncIterator[StoppableNode]:
        job = self.job
        with warm_agents():
            async with recording(server) as workflows, nothing_left(job):
                job.job_id, job.group_id = workflows.job.id, workflows.group.id
                job.job_first_run_id = workflows.job.first_execution_run_id or ""
                self._workflows, self._request = workflows, job.request()
                await self._backend.create(self._request)
                await eventually((self.code / "started").exists)
                yield self

    async def stop(self, grace: float) -> None:
        """Returns once the agent has taken the command."""
        stop = StopRequest(grace=timedelta(seconds=grace), reason="a newer one is there")
        command = ApplyDesired(node=self._request.node, version=1, desired=NodeDesired(stop=stop))
        call = Call(queue=self._request.task_queue, activity="apply_desired", argument=command.model_dump(mode="json"))
        answer = await self._workflows.group.execute_update(Recorder.call, call)  # pyrefly: ignore[no-matching-overload]
        assert answer["accepted"], answer

    async def leave(self, reason: str) -> None:
        """The process that started the node tells its agent."""
        socket = NodeFolder(self.job.folder()).run_dir / "agent.sock"
        await eventually(socket.exists)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket))) as session,
            session.post("http://node/v1/leave", json={"reason": reason}) as answer,
        ):
            assert answer.status == 200, await answer.text()

    async def failures(self) -> list[Seen]:
        return await self._workflows.seen(self._workflows.job, "failure")

    async def gone(self) -> None:
        """Returns once neither command, launcher nor agent is left."""
        await eventually(lambda: not self.job.processes())


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tmp_path_factory.mktemp("s"), tmp_path_factory.mktemp("code")


async def test_a_short_grace_ends_what_would_take_its_time(
    temporal_server: DevServer, folders: tuple[Path, Path]
) -> None:
    node = StoppableNode(temporal_server, *folders, saving_takes=600, grace="10m")
    async with node.running(temporal_server):
        await node.stop(grace=0.5)
        await node.gone()
    assert (node.code / "saving").exists()
    assert not (node.code / "saved").exists()


async def test_a_long_grace_lets_the_command_save(temporal_server: DevServer, folders: tuple[Path, Path]) -> None:
    node = StoppableNode(temporal_server, *folders, saving_takes=3, grace="100ms")
    async with node.running(temporal_server):
        await node.stop(grace=60)
        await node.gone()
    assert (node.code / "saved").exists()


async def test_a_second_stop_shortens_the_grace(temporal_server: DevServer, folders: tuple[Path, Path]) -> None:
    node = StoppableNode(temporal_server, *folders, saving_takes=600, grace="1s")
    async with node.running(temporal_server):
        await node.stop(grace=600)
        await eventually((node.code / "saving").exists)
        await node.stop(grace=0)
        await node.gone()
    assert not (node.code / "saved").exists()


async def test_the_starter_of_the_node_ends_it_and_no_failure_is_reported(
    temporal_server: DevServer, folders: tuple[Path, Path]
) -> None:
    node = StoppableNode(temporal_server, *folders, saving_takes=1, grace="30s")
    async with node.running(temporal_server):
        await node.leave("its machine is taken away")
        await node.gone()
        assert not await node.failures()
    assert (node.code / "saved").exists()
