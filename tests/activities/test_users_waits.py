"""Tests that what users make a worker wait for takes none of the threads with which it serves others."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest
from temporalio.client import Client

from perdure.activities import archive
from perdure.activities.archive import ArchiveActivities, ArchivePlaces
from perdure.activities.webhooks import AddressPolicy, DeliveryFailed, post
from perdure.contract import ArchivedJob, ArchiveRequest
from tests.support.waiting import DEADLINE, eventually

NOW = datetime.now(UTC)
ENDED = ArchivedJob(
    namespace="default",
    name="job",
    uid="0123abcd",
    workflow_id="job/default/job",
    run_id="r",
    written_at=NOW,
    started_at=NOW,
)


@pytest.fixture
async def released() -> AsyncIterator[threading.Event]:
    """What users have the worker wait for, until another one was served. There is one thread for all others."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    event = threading.Event()
    yield event
    event.set()


async def serves_others(released: threading.Event) -> None:
    async with asyncio.timeout(DEADLINE):
        await asyncio.to_thread(released.set)


async def test_an_archive_that_hangs(released: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        begun.set()
        released.wait()
        raise OSError("stale file handle")

    async def read(*_: Any) -> ArchivedJob:
        return ENDED

    monkeypatch.setattr(archive, "open_storage", hang)
    monkeypatch.setattr(archive, "read_job", read)
    activities = ArchiveActivities(Client.__new__(Client), ArchivePlaces(own_machine=True))
    request = ArchiveRequest(namespace="default", name="job", uid="0123abcd", url="file:///gone", first_run_id="r")
    writing = asyncio.create_task(activities.archive_job(request))
    await eventually(begun.is_set)
    await serves_others(released)
    with pytest.raises(Exception, match="stale file handle"):
        await writing


async def test_name_servers_that_never_answer(released: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def hang(*_: Any, **__: Any) -> Any:
        begun.set()
        released.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    posting = asyncio.create_task(post("https://hook.never.example/", b"{}", {}, AddressPolicy()))
    await eventually(begun.is_set)
    await serves_others(released)
    with pytest.raises(DeliveryFailed, match=r"hook\.never\.example"):
        await posting
