"""Tests of the client of an agent that is sometimes away, and sometimes answers with errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from perdure_launcher.agent_link import session as session_module
from perdure_launcher.agent_link.session import AgentSession, Outbox
from perdure_training.node_api import agent_client
from perdure_training.node_api.agent_client import Agent, AgentAway, AgentConnection, AgentRefused
from perdure_training.node_api.bodies import FinishedReport, LauncherHello, RankExit, ReadyReport
from perdure_training.node_api.codec import plain
from tests.support.waiting import DEADLINE

PATIENCE = timedelta(seconds=30)
HELLO = LauncherHello(pid=1)


class Server:
    """Answers as it is told, and remembers what it heard."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard: list[tuple[str, Any]] = []
        self.status = 200
        self.body: Any = {}
        self.greeting: dict[str, Any] = {}
        """The answer to `/hello`."""
        self.unparsable = ""
        """A text that makes a request malformed."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self.path.unlink(missing_ok=True)
        await web.UnixSite(self._runner, str(self.path)).start()

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        text = await request.text()
        self.heard.append((request.path, json.loads(text) if text else None))
        if self.unparsable and self.unparsable in text:
            return web.json_response({"error": "no JSON"}, status=400)
        if request.path == "/hello":
            return web.json_response(self.greeting)
        return web.json_response(self.body, status=self.status)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a session has noticed that its agent is away."""
    noticed = threading.Event()
    monkeypatch.setattr(session_module.logger, "info", lambda *_: noticed.set())
    return noticed


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory(prefix="pl-") as directory:
        server = Server(Path(directory) / "agent.sock")
        yield server
        await server.stop()


def session(server: Server, **options: Any) -> AgentSession:
    return AgentSession(socket_path=server.path, hello_path="/hello", hello=lambda: HELLO, **options)


async def test_an_answer_is_an_object_and_errors_are_told_apart(server: Server) -> None:
    connection = AgentConnection(server.path)
    with pytest.raises(AgentAway, match="the agent does not answer") as raised:
        await asyncio.to_thread(connection.request, "GET", "/x")
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    await server.start()
    assert await asyncio.to_thread(connection.request, "GET", "/x") == {}
    server.status, server.body = 400, {"error": "what?"}
    with pytest.raises(AgentRefused, match=r"^what\?$"):
        await asyncio.to_thread(connection.request, "GET", "/x")
    with pytest.raises(AgentRefused, match=r"^what\?$"):
        await asyncio.to_thread(Agent(server.path).post, "/x", {"of": "a rank"})
    server.body = ["what?"]
    with pytest.raises(AgentRefused, match=r"^GET /x: 400 .*what"):
        await asyncio.to_thread(connection.request, "GET", "/x")
    server.status = 500
    with pytest.raises(AgentAway, match="500"):
        await asyncio.to_thread(connection.request, "GET", "/x")
    server.status, server.body = 200, [1]
    with pytest.raises(AgentAway):
        await asyncio.to_thread(connection.request, "GET", "/x")


def test_pauses_double_up_to_the_longest() -> None:
    assert list(itertools.islice(agent_client.pauses(first=0.1, longest=0.5), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]


async def test_a_silent_agent_counts_as_gone(server: Server) -> None:
    listener = await asyncio.start_unix_server(lambda reader, writer: asyncio.sleep(60), server.path)
    connection = AgentConnection(server.path)
    with pytest.raises(AgentAway, match="timed out"):
        await asyncio.to_thread(connection.request, "GET", "/x", within=0.2)
    listener.close()


async def test_posts_arrive_in_order_after_a_greeting_however_late_the_agent_is(server: Server) -> None:
    talk = session(server)
    outbox = Outbox(talk)
    outbox.start()
    delivered = threading.Event()
    for number in range(5):
        outbox.post("/said", FinishedReport(generation=number), delivered=delivered.set if number == 4 else None)
    assert outbox.holds("/said")
    assert not await asyncio.to_thread(outbox.flush, timedelta(milliseconds=300))
    await server.start()
    assert await asyncio.to_thread(outbox.flush, PATIENCE)
    reports = [plain(FinishedReport(generation=number)) for number in range(5)]
    assert server.heard == [("/hello", plain(HELLO)), *(("/said", report) for report in reports)]
    assert await asyncio.to_thread(delivered.wait, 30)
    talk.close()


async def test_an_agent_that_was_away_is_greeted_again_before_it_hears_more(
    server: Server, pauses: threading.Event
) -> None:
    returned = threading.Event()
    talk = session(server, on_return=returned.set)
    connection = talk.connect()
    await server.start()
    await asyncio.to_thread(talk.call, connection, "GET", "/first")
    assert not returned.is_set()
    await server.stop()
    waiting = asyncio.create_task(asyncio.to_thread(talk.call, connection, "GET", "/second"))
    assert await asyncio.to_thread(pauses.wait, 30)
    await server.start()
    assert await waiting == {}
    assert [path for path, _ in server.heard] == ["/hello", "/first", "/hello", "/second"]
    assert returned.is_set()
    talk.close()


async def test_a_request_that_finds_the_agent_back_wakes_all_that_wait_for_it(
    server: Server, pauses: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "pauses", lambda: itertools.repeat(3600.0))
    talk = session(server)
    connection = talk.connect()
    await server.start()
    await asyncio.to_thread(talk.call, connection, "GET", "/first")
    await server.stop()
    pausing = asyncio.create_task(asyncio.to_thread(talk.call, connection, "GET", "/second"))
    assert await asyncio.to_thread(pauses.wait, 30)
    await server.start()
    await asyncio.to_thread(talk.call, talk.connect(), "GET", "/third")
    assert await asyncio.wait_for(pausing, 30) == {}
    talk.close()


async def test_what_the_agent_cannot_parse_is_sent_again_without_its_texts(server: Server) -> None:
    await server.start()
    server.unparsable = "odd"
    talk = session(server)
    outbox = Outbox(talk)
    outbox.start()
    ended = RankExit(local_rank=1, signal=9, error="odd", time=1.5)
    outbox.post("/ready", ReadyReport(after_generation=3, ranks=(ended,), store_ports=(1, 2)))
    assert await asyncio.to_thread(outbox.flush, PATIENCE)
    report = plain(ReadyReport(after_generation=3, ranks=(ended,), store_ports=(1, 2)))
    del report["ranks"][0]["error"]
    assert server.heard[-1] == ("/ready", report)
    talk.close()


async def test_what_the_agent_refuses_is_dropped_and_holds_nothing_up(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    await server.start()
    server.status, server.body = 422, {"error": "no such field"}
    talk = session(server)
    outbox = Outbox(talk)
    outbox.start()
    outbox.post("/wrong", FinishedReport(generation=1))
    assert await asyncio.to_thread(outbox.flush, PATIENCE)
    server.status, server.body = 200, {}
    outbox.post("/right", FinishedReport(generation=2))
    assert await asyncio.to_thread(outbox.flush, PATIENCE)
    assert [path for path, _ in server.heard] == ["/hello", "/wrong", "/wrong", "/right"]
    assert "the agent refused a report to /wrong, and it is dropped: no such field" in caplog.text
    talk.close()


async def test_a_closed_session_answers_none(server: Server, pauses: threading.Event) -> None:
    await server.start()
    talk = session(server)
    connection = talk.connect()
    assert await asyncio.to_thread(talk.call, connection, "GET", "/first") == {}
    await server.stop()
    asking = asyncio.create_task(asyncio.to_thread(talk.call, connection, "GET", "/x"))
    assert await asyncio.to_thread(pauses.wait, 30)
    talk.close()
    assert await asyncio.wait_for(asking, 30) is None


async def test_an_agent_of_another_protocol_is_not_worked_with_and_the_reason_is_logged_once(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    await server.start()
    server.greeting = {"protocol": 7}
    talk = session(server)
    asking = asyncio.create_task(asyncio.to_thread(talk.call, talk.connect(), "GET", "/first"))
    async with asyncio.timeout(DEADLINE):
        while len(server.heard) < 3:
            await asyncio.sleep(0.05)
    refusals = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(refusals) == 1
    assert "launcher speaks protocol 1 and the agent speaks protocol 7" in refusals[0]
    assert "perdure restart JOB --node NODE" in refusals[0]
    assert {path for path, _ in server.heard} == {"/hello"}
    server.greeting = {"protocol": 1}
    assert await asyncio.wait_for(asking, 30) == {}
    talk.close()
