"""Tests of the README's first commands, on a machine where nothing of Perdure runs, with fewer steps."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples.demo.faults import kill_rank
from perdure.base.errors import ExitCode
from perdure.base.state_folder import StateFolder
from perdure.local.control_plane import LocalControlPlane
from tests.docs.commands import COMMANDS
from tests.support.allocation import REPOSITORY
from tests.support.command_line import end_nodes

PRINTED = [command.words for command in COMMANDS if command.page == "README.md" and command.whole]
RUN = next(words for words in PRINTED if words[:2] == ("perdure", "run"))


@pytest.fixture
async def environment(tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    """That of a reader who has entered the environment of `make setup`."""
    state = StateFolder(tmp_path / "state")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    unset = ("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE", "PERDURE_NAMESPACE", "PERDURE_TASK_QUEUE")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    yield {**kept, "PATH": path, "PERDURE_STATE": str(state.path)}
    plane = LocalControlPlane(state)
    plane.kill_worker()
    plane.kill_server()
    end_nodes(state.path)


@pytest.mark.long("commands")
async def test_the_commands_of_the_readme_start_a_job_and_break_it(environment: dict[str, str]):
    """`make setup` has made what this runs in; `kill` meets a rank of this job alone."""
    assert ("make", "setup") in PRINTED
    run = await started(environment, *RUN)
    try:
        async with asyncio.timeout(240):
            name = (await until(run, r"Submitted (\S+)"))[1]
            await until(run, r"RUNNING +3 nodes")
            status = await started(environment, "perdure", "status", name, "-o", "json")
            told, _ = await status.communicate()
            assert kill_rank(json.loads(told)["uid"], "worker", rank=1)
            await until(run, r"generation 2 .*ranks")
            await finished(environment, "perdure", "explain", "NAME", name=name, says="SIGKILL")
            await finished(environment, "perdure", "worker", "--detach", name=name)
            await finished(environment, "perdure", "cancel", "NAME", "--wait", name=name)
            assert run.stdout is not None
            await run.stdout.read()
            assert await run.wait() == ExitCode.CANCELLED
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()


async def started(environment: dict[str, str], *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *words,
        cwd=REPOSITORY,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def until(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """The first line from now on that matches."""
    assert process.stdout is not None
    seen: list[str] = []
    async for line in process.stdout:
        seen.append(line.decode())
        if match := re.search(pattern, seen[-1]):
            return match
    raise AssertionError(f"ended before it said {pattern!r}: {''.join(seen)}")


async def finished(environment: dict[str, str], *words: str, name: str, says: str = "") -> None:
    """Runs a command as the README prints it, for the job of this name."""
    assert words in PRINTED
    process = await started(environment, *(name if word == "NAME" else word for word in words))
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert says in output.decode()
