"""The client without async: for notebooks and scripts that have no event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from perdure.client.client import Client

Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")


def _blocking(
    method: Callable[Concatenate[Client, Arguments], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[SyncClient, Arguments], ResultT]:
    """Returns a method of SyncClient that blocks until the same method of its client returns."""

    @wraps(method)
    def call(self: SyncClient, *args: Arguments.args, **kwargs: Arguments.kwargs) -> ResultT:
        return self._run(method(self._client, *args, **kwargs))  # pyrefly: ignore[protected-access]

    return call


def _iterating(
    method: Callable[Concatenate[Client, Arguments], AsyncGenerator[ResultT]],
) -> Callable[Concatenate[SyncClient, Arguments], Iterator[ResultT]]:
    """Returns a method of SyncClient whose iterator blocks until the same method of its client yields."""

    @wraps(method)
    def call(self: SyncClient, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Iterator[ResultT]:
        return self._iterate(method(self._client, *args, **kwargs))  # pyrefly: ignore[protected-access]

    shown = signature(method)
    returned = str(shown.return_annotation).replace("AsyncGenerator", "Iterator")
    vars(call)["__signature__"] = shown.replace(return_annotation=returned)
    return call


class SyncClient:
    """`Client`, method for method; each call blocks until its answer has arrived.

        with SyncClient() as client:
            job = client.submit("job.yaml")
            result = client.wait(job.name)

    Methods have the arguments of `Client`'s; where those yield, these return an iterator.
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

    submit = _blocking(Client.submit)
    status = _blocking(Client.status)
    incidents = _blocking(Client.incidents)
    nodes = _blocking(Client.nodes)
    nodes_of = _blocking(Client.nodes_of)
    look = _blocking(Client.look)
    news = _iterating(Client.news)
    datasets = _blocking(Client.datasets)
    refreshed = _blocking(Client.refreshed)
    list = _blocking(Client.list)
    task_failures = _blocking(Client.task_failures)
    pauses = _blocking(Client.pauses)
    failing_activities = _blocking(Client.failing_activities)
    describe = _blocking(Client.describe)
    history = _blocking(Client.history)
    wait = _blocking(Client.wait)
    watch = _iterating(Client.watch)
    logs = _iterating(Client.logs)
    stacks = _blocking(Client.stacks)
    check = _blocking(Client.check)
    replay = _blocking(Client.replay)
    scale = _blocking(Client.scale)
    preview_scale = _blocking(Client.preview_scale)
    suspend = _blocking(Client.suspend)
    pause_repairs = _blocking(Client.pause_repairs)
    resume_repairs = _blocking(Client.resume_repairs)
    resume = _blocking(Client.resume)
    restart = _blocking(Client.restart)
    save_checkpoint = _blocking(Client.save_checkpoint)
    relaunch_node = _blocking(Client.relaunch_node)
    cancel = _blocking(Client.cancel)
    issue_ticket = _blocking(Client.issue_ticket)
    revoke_ticket = _blocking(Client.revoke_ticket)
    notifications = _blocking(Client.notifications)
    send_sample = _blocking(Client.send_sample)

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
