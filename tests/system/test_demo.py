"""Tests of the demo as a process: ended by a signal, it leaves nothing that runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from examples.demo.__main__ import done
from examples.demo.steps import read_samples
from examples.demo.train import BATCH
from perdure.base.state_folder import StateFolder
from perdure.contract import IncidentView, JobPhase, RestoreSource
from perdure.local.control_plane import LocalControlPlane
from tests.support.allocation import REPOSITORY
from tests.support.command_line import end_nodes
from tests.system.site import Site


@pytest.fixture
async def demo(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The demo, with all its files in the test's folder."""
    async with running("examples.demo", tmp_path) as process:
        yield process


@pytest.fixture
async def demo_of_roles(tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The demo of roles, with all its files in the test's folder."""
    async with running("examples.demo.roles", tmp_path) as process:
        yield process


@asynccontextmanager
async def running(module: str, tmp_path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module),
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for one in of_the_demo(tmp_path):
            one.kill()
        end_nodes(tmp_path)


def test_the_table_tells_from_where_the_training_continued() -> None:
    now = datetime.now(UTC)
    incident = IncidentView(number=1, title="node 2: lost", started_at=now, noticed_at=now, action="replace node 2")
    assert done(incident) == "replace node 2"
    restored = {"restored_step": 140, "restored_from": RestoreSource.PEER, "steps_again": 1}
    assert done(incident.model_copy(update=restored)) == (
        "replace node 2; continued from step 140 in the memory of another node, with 1 step made again"
    )


@pytest.mark.long("survival")
async def test_samples_are_counted_whose_rank_died_once_its_gradients_were_shared(site: Site, tmp_path: Path) -> None:
    """The step counts, since the other rank has saved what both made of it."""
    out = tmp_path / "trained"
    script = Path(__file__).with_name("dies_once_shared.py")
    job = await site.submit(
        command=["torchrun", str(script), "--steps", "40", "--out", str(out)],
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "OUT": str(out)},
    )
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    [incident] = await job.incidents()
    assert (incident.restored_step, incident.steps_again) == (20, 0)
    samples = read_samples(out)
    assert {step: len(read) for step, read in samples.of_steps.items()} == dict.fromkeys(range(1, 41), BATCH)


@pytest.mark.long("survival")
async def test_sigterm_ends_everything_that_the_demo_started(demo: asyncio.subprocess.Process, tmp_path: Path) -> None:
    """The signal comes while the demo itself has killed the server and the worker, with nodes that are starting."""
    await said(demo, "job submitted")
    [folder] = tmp_path.glob("perdure-demo-*")
    plane = LocalControlPlane(StateFolder(folder / "state"))
    assert plane.status().server
    plane.kill_worker()
    plane.kill_server()
    demo.send_signal(signal.SIGTERM)
    await said(demo, "all processes of the demo have ended")
    assert await demo.wait() == 1
    assert of_the_demo(tmp_path) == []
    assert not folder.exists()


@pytest.mark.long("roles")
@pytest.mark.timeout(440)
@pytest.mark.parametrize("words", ["model learn", "kill -9 of a whole node of reward"], ids=["learning", "recovering"])
async def test_ctrl_c_ends_everything_that_the_demo_of_roles_started(
    demo_of_roles: asyncio.subprocess.Process, tmp_path: Path, words: str
) -> None:
    await said(demo_of_roles, words, within=200)
    [folder] = tmp_path.glob("perdure-demo-*")
    demo_of_roles.send_signal(signal.SIGINT)
    await said(demo_of_roles, "all processes of the demo have ended", within=200)
    assert await demo_of_roles.wait() == 1
    assert of_the_demo(tmp_path) == []
    assert not folder.exists()


async def said(demo: asyncio.subprocess.Process, words: str, *, within: float = 120) -> None:
    """Returns when the demo has printed a line with these words."""
    assert demo.stdout
    printed: list[str] = []
    async with asyncio.timeout(within):
        async for line in demo.stdout:
            printed.append(line.decode())
            if words in printed[-1]:
                return
    raise AssertionError(f"{words!r} was not printed, but: {''.join(printed)}")


def of_the_demo(folder: Path) -> list[psutil.Process]:
    """Processes that use the demo's folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            known = [*process.cmdline(), process.cwd(), *process.environ().values()]
        except psutil.Error:
            continue
        if any(str(folder / "perdure-demo-") in text for text in known):
            found.append(process)
    return found
