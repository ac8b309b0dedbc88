"""The memory of killed launchers and agents of this machine, which no other launcher has to start for."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.client import Client

from perdure.activities.nodes.local import backend, memory
from perdure.activities.nodes.local.backend import LocalBackend
from perdure_launcher.system.memory_folder import COPIES_PREFIX, KEPT_FOR, MEMORY_PREFIX, MemoryFolder
from tests.support.waiting import eventually


def abandoned(root: Path, prefix: str) -> Path:
    """A folder whose process was killed, found so long ago that nothing will start it again."""
    folder = MemoryFolder(root, node="job/worker-0", prefix=prefix)
    os.close(folder._lock)
    mark = folder.path / "abandoned"
    mark.touch()
    since = asyncio.get_running_loop().time() - KEPT_FOR.total_seconds() - 1
    os.utime(mark, (since, since))
    return folder.path


@asynccontextmanager
async def keeping_free(root: Path) -> AsyncGenerator[None]:
    """Looks every tenth of a second."""
    task = asyncio.create_task(memory.keep_free(root, interval=timedelta(milliseconds=100)))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_what_was_abandoned_for_long_goes_and_the_rest_stays(tmp_path: Path) -> None:
    mine = MemoryFolder(tmp_path, node="job/worker-1")
    young = MemoryFolder(tmp_path, node="job/worker-2")
    os.close(young._lock)
    async with keeping_free(tmp_path):
        for prefix in (MEMORY_PREFIX, COPIES_PREFIX):
            left = abandoned(tmp_path, prefix)
            await eventually(lambda left=left: not left.exists())
    assert set(tmp_path.iterdir()) == {mine.path, young.path}
    mine.remove()


async def test_it_goes_on_after_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(root: Path, *, prefix: str) -> None:
        raise OSError("Input/output error")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(memory, "delete_abandoned", fail)
        async with keeping_free(tmp_path):
            await eventually(lambda: "cannot be given back: Input/output error" in caplog.text)
            patched.undo()
            left = abandoned(tmp_path, MEMORY_PREFIX)
            await eventually(lambda: not left.exists())


async def test_a_worker_of_the_local_backend_does_it(
    tmp_path: Path, temporal_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def keep_free() -> None:
        begun.set()

    monkeypatch.setattr(backend.memory, "keep_free", keep_free)
    tidying = asyncio.create_task(LocalBackend(tmp_path).keep_tidy(temporal_client))
    await begun.wait()
    tidying.cancel()
    await asyncio.gather(tidying, return_exceptions=True)
