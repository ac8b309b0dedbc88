"""An agent's server in a thread, with a store that decides as the real one, for tests of the training library."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure.agent.checks import Checker
from perdure.agent.progress import ProgressReader
from perdure.agent.server import NodeServer
from perdure.agent.stacks import StackReader
from perdure.agent.store import StoreRelay
from perdure.agent.telemetry import Telemetry
from perdure.contract import StoreAnswers, StoreRequest
from perdure.workflows.policy.services.store import StoreState, answer_calls, nodes_to_notify, record_notification
from tests.agent.bench import IDENTITY, Bench


class AgentInThread:
    """A node whose ranks call a store; there is no Temporal."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "agent.sock"
        self.lost_answers = 0
        """The number of answers of the store that are lost on their way to the agent from now on."""
        self.calls = 0
        self._folder = folder
        self._state = StoreState()
        self._bench = Bench(folder)
        self._bench.apply(1)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    async def _call(self, request: StoreRequest) -> StoreAnswers:
        self.calls += len(request.calls)
        self._state, answers = answer_calls(self._state, request)
        for path, watch in nodes_to_notify(self._state).items():
            self._loop.call_soon(self._store.notify)
            self._state = record_notification(self._state, path, watch.changes)
        if self.lost_answers:
            self.lost_answers -= 1
            raise ConnectionError("the answer was lost")
        return StoreAnswers(calls=answers)

    async def _serve(self) -> None:
        bench = self._bench
        self._store = StoreRelay(
            IDENTITY,
            send=self._call,
            state=lambda: bench.node.state,
            changed=bench.node.changed,
            to_group=bench.group.put,
        )
        telemetry = Telemetry(bench.node, ProgressReader(self._folder), to_group=bench.group)
        server = NodeServer(
            bench.node,
            telemetry,
            self._folder,
            datasets=bench.datasets,
            store=self._store,
            stacks=StackReader(bench.node),
            checks=Checker(bench.node),
            on_hello=lambda _: None,
            on_waits=lambda: None,
        )
        await server.start()
        self._ready.set()
        await self._stop.wait()

    def begin_anew(self) -> None:
        """The workflow of the store was terminated, and another one started."""
        self._loop.call_soon_threadsafe(lambda: setattr(self, "_state", StoreState()))

    def begin_generation(self, generation: int, *, keeps_processes: bool = False) -> None:
        """A newer world reaches the node."""
        done = threading.Event()

        def apply() -> None:
            self._bench.apply(generation, keeps_processes=keeps_processes)
            done.set()

        self._loop.call_soon_threadsafe(apply)
        assert done.wait(30)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@contextmanager
def agent_in_thread() -> Iterator[AgentInThread]:
    """An agent that serves until the context ends."""
    # The path of a socket is short.
    with tempfile.TemporaryDirectory() as folder:
        agent = AgentInThread(Path(folder))
        agent.start()
        try:
            yield agent
        finally:
            agent.stop()
