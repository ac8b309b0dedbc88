"""Tests of a node on a machine that joins: what of it is kept running, and what is ended with it."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.nodes.joined.machine import this_machine
from perdure.activities.nodes.joined.node_session import AgentConnection, NodeSession
from perdure.activities.nodes.local.processes import kill_leftovers
from perdure_launcher.rank_plugins.stack_file import StackFile
from perdure_launcher.system.processes import read_process
from perdure_training.node_api.layout import STACKS
from tests.activities.local_nodes import LocalJob
from tests.support.waiting import DEADLINE, eventually

SLEEPS = (sys.executable, "-S", "-E", "-c", "import time; print('up', flush=True); time.sleep(600)")


async def test_an_agent_that_cannot_be_started_again_for_a_moment_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_STATE", str(tmp_path))
    session = NodeSession(LocalJob(tmp_path).request(), this_machine("127.0.0.1:9"), connection=AgentConnection())
    agents, processes = asyncio.Queue[Process](), list[Process]()
    failures = [OSError(errno.EAGAIN, "too many processes"), None, OSError(errno.EMFILE, "too many files")]

    async def start(module: str, *_: Any, **__: Any) -> Process:
        if module == "perdure.agent" and failures and (failure := failures.pop()) is not None:
            raise failure
        process = await asyncio.create_subprocess_exec(*SLEEPS, stdout=subprocess.DEVNULL)
        processes.append(process)
        if module == "perdure.agent":
            agents.put_nowait(process)
        return process

    monkeypatch.setattr(session, "_start", start)
    running = asyncio.create_task(session.run())
    async with asyncio.timeout(DEADLINE):
        first = await agents.get()
        first.kill()
        second = await agents.get()
        assert not failures
        await session.kill()
        ending = await running
    assert ending.signal == 9
    assert second.returncode is not None
    assert {process.returncode is not None for process in processes} == {True}


@pytest.mark.parametrize(("began", "signed"), [(1, 0), (-1, 0), (0, -3600)])
async def test_no_process_is_ended_whose_group_may_have_got_the_number_of_a_rank(
    tmp_path: Path, began: int, signed: int
) -> None:
    """As after a reboot: the rank's leader began at another time, or its rank has told nothing for an hour."""
    with subprocess.Popen(SLEEPS, env={}, start_new_session=True, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        process = read_process(other.pid)
        assert process is not None
        mark = tmp_path / STACKS / StackFile(1, 0, other.pid, process.start_ticks + began).name
        mark.parent.mkdir()
        mark.touch()
        os.utime(mark, (time.time() + signed, time.time() + signed))
        assert not await kill_leftovers("0a1b2c3d/worker-0/1", run_dir=tmp_path)
        assert other.poll() is None
        other.kill()


async def test_what_has_overwritten_the_variables_of_its_rank_is_ended_with_its_node(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEPS, env={}, start_new_session=True, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        assert left.stdout.readline() == b"up\n"
        process = read_process(left.pid)
        assert process is not None
        folder = tmp_path / STACKS
        folder.mkdir()
        assert not await kill_leftovers("0a1b2c3d/worker-0/1", run_dir=tmp_path)
        (folder / StackFile(1, 0, left.pid, process.start_ticks).name).touch()
        assert await kill_leftovers("0a1b2c3d/worker-0/1", run_dir=tmp_path) == 1
        assert await eventually(lambda: left.poll() is not None)
