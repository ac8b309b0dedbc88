"""Follows a job for as long as it runs, and tells of a control plane that answers late or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from perdure.base.errors import ControlPlaneUnreachable, PerdureError
from perdure.client.views import JobSnapshot, overall_progress

if TYPE_CHECKING:
    from perdure.client.connection import Endpoint
    from perdure.contract import JobResult, JobStatus, NodeView

SLOW = timedelta(seconds=5)
"""The time without an answer after which a caller is told so: a healthy server and worker answer within a second."""


class Watching(Protocol):
    """The calls of a client with which a job is followed."""

    @property
    def endpoint(self) -> Endpoint: ...

    async def look(self, name: str, *, namespace: str | None) -> tuple[JobStatus, tuple[NodeView, ...]]: ...

    async def status(self, name: str, *, namespace: str | None) -> JobStatus: ...

    async def wait(self, name: str, *, namespace: str | None, outage: timedelta | None) -> JobResult: ...


async def watch_job(
    client: Watching, name: str, namespace: str | None, interval: timedelta
) -> AsyncGenerator[JobSnapshot]:
    """Yields snapshots of a job until it ends: see `Client.watch`."""
    waiting = asyncio.create_task(client.wait(name, namespace=namespace, outage=None))
    looking = None
    snapshot = JobSnapshot(time=datetime.now(UTC))
    try:
        while not waiting.done():
            looking = asyncio.create_task(client.look(name, namespace=namespace))
            async for _ in lateness(looking):
                problem = f"{client.endpoint.address} and its worker have not answered for seconds"
                yield snapshot.model_copy(update={"time": datetime.now(UTC), "problem": problem})
            try:
                status, nodes = await looking
            except ControlPlaneUnreachable as error:
                snapshot = snapshot.model_copy(update={"time": datetime.now(UTC), "problem": str(error)})
            else:
                progress = overall_progress(nodes, status) or snapshot.progress
                snapshot = JobSnapshot(time=datetime.now(UTC), status=status, nodes=nodes, progress=progress)
            yield snapshot
            await asyncio.wait([waiting], timeout=interval.total_seconds())
        result = waiting.result()
        with suppress(PerdureError):
            snapshot = snapshot.model_copy(update={"status": await client.status(name, namespace=namespace)})
        yield snapshot.model_copy(update={"time": datetime.now(UTC), "result": result, "problem": ""})
    finally:
        started: list[asyncio.Task[Any]] = [waiting, *([looking] if looking is not None else [])]
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)


async def lateness(answer: asyncio.Task[Any]) -> AsyncGenerator[timedelta]:
    """Yields for how long an answer has been awaited, each time that this has become longer by `SLOW`, until it has
    arrived."""
    late = timedelta()
    while not (await asyncio.wait([answer], timeout=SLOW.total_seconds()))[0]:
        late += SLOW
        yield late
