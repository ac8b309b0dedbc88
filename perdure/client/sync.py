"""The client without async: for notebooks and scripts that have no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from perdure.client.client import OUTAGE_LIMIT, TICKET_LIFETIME, WATCH_INTERVAL, Client
from perdure.client.logs import LogLine
from perdure.client.views import IssuedTicket, JobSnapshot, JobSummary, Submission
from perdure.contract import Accepted, IncidentView, JobResult, JobStatus, NodeView
from perdure.spec.job import JobSpec

ResultT = TypeVar("ResultT")


class SyncClient:
    """`Client`, method for method; each call blocks until its answer has arrived.

    with SyncClient() as client:
        job = client.submit("job.yaml")
        result = client.wait(job.name)
    """

    def __init__(self, *, address: str | None = None, namespace: str = "default") -> None:
        self._client = Client(address=address, namespace=namespace)
        self._loop = asyncio.new_event_loop()
        # A loop of its own, on a thread of its own: notebooks already run one on the main thread.
        self._thread = threading.Thread(target=self._loop.run_forever, name="perdure-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self._run(self._client.connect())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the client's thread; jobs continue."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def submit(
        self, spec: JobSpec | Mapping[str, Any] | str | Path, *, overrides: Mapping[str, Any] | None = None
    ) -> Submission:
        """See `Client.submit`."""
        return self._run(self._client.submit(spec, overrides=overrides))

    def status(self, name: str, *, namespace: str | None = None) -> JobStatus:
        """See `Client.status`."""
        return self._run(self._client.status(name, namespace=namespace))

    def incidents(self, name: str, *, namespace: str | None = None) -> list[IncidentView]:
        """See `Client.incidents`."""
        return self._run(self._client.incidents(name, namespace=namespace))

    def nodes(self, name: str, *, namespace: str | None = None) -> tuple[NodeView, ...]:
        """See `Client.nodes`."""
        return self._run(self._client.nodes(name, namespace=namespace))

    def describe(self, name: str, *, namespace: str | None = None) -> JobSummary:
        """See `Client.describe`."""
        return self._run(self._client.describe(name, namespace=namespace))

    def wait(self, name: str, *, namespace: str | None = None, outage: timedelta | None = OUTAGE_LIMIT) -> JobResult:
        """See `Client.wait`."""
        return self._run(self._client.wait(name, namespace=namespace, outage=outage))

    def watch(
        self, name: str, *, namespace: str | None = None, interval: timedelta = WATCH_INTERVAL
    ) -> Iterator[JobSnapshot]:
        """See `Client.watch`."""
        return self._iterate(self._client.watch(name, namespace=namespace, interval=interval))

    def logs(
        self,
        name: str,
        *,
        namespace: str | None = None,
        node: int | Collection[int] | None = None,
        incarnation: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
    ) -> Iterator[LogLine]:
        """See `Client.logs`."""
        lines = self._client.logs(
            name, namespace=namespace, node=node, incarnation=incarnation, follow=follow, tail=tail, since=since
        )
        return self._iterate(lines)

    def list(
        self, *, namespace: str | None = None, everywhere: bool = False, running: bool = False, limit: int = 100
    ) -> list[JobSummary]:
        """See `Client.list`."""
        return self._run(self._client.list(namespace=namespace, everywhere=everywhere, running=running, limit=limit))

    def scale(self, name: str, nodes: int | str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """See `Client.scale`."""
        return self._run(self._client.scale(name, nodes, namespace=namespace, reason=reason))

    def suspend(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """See `Client.suspend`."""
        return self._run(self._client.suspend(name, namespace=namespace, reason=reason))

    def resume(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """See `Client.resume`."""
        return self._run(self._client.resume(name, namespace=namespace, reason=reason))

    def restart(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """See `Client.restart`."""
        return self._run(self._client.restart(name, namespace=namespace, reason=reason))

    def save_checkpoint(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """See `Client.save_checkpoint`."""
        return self._run(self._client.save_checkpoint(name, namespace=namespace, reason=reason))

    def relaunch_node(self, name: str, rank: int, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """See `Client.relaunch_node`."""
        return self._run(self._client.relaunch_node(name, rank, namespace=namespace, reason=reason))

    def cancel(self, name: str, *, namespace: str | None = None, reason: str = "") -> Accepted:
        """See `Client.cancel`."""
        return self._run(self._client.cancel(name, namespace=namespace, reason=reason))

    def issue_ticket(
        self, name: str, *, nodes: int = 1, lifetime: timedelta = TICKET_LIFETIME, namespace: str | None = None
    ) -> IssuedTicket:
        """See `Client.issue_ticket`."""
        return self._run(self._client.issue_ticket(name, nodes=nodes, lifetime=lifetime, namespace=namespace))

    def revoke_ticket(self, name: str, ticket: str, *, namespace: str | None = None) -> Accepted:
        """See `Client.revoke_ticket`."""
        return self._run(self._client.revoke_ticket(name, ticket, namespace=namespace))

    def _run(self, call: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, items: AsyncGenerator[ResultT]) -> Iterator[ResultT]:
        async def next_item() -> ResultT:
            return await anext(items)

        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield self._run(next_item())
        finally:
            self._run(items.aclose())
