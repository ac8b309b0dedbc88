"""Tests of what stands before the Temporal UI: it passes on what the UI's own pages send, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from perdure.base.ui_proxy import ui_proxy
from tests.support.temporal_server import free_port
from tests.support.waiting import DEADLINE

PATH = "/namespaces/default/workflows/job%2Fdefault%2Fllama/run?query=a%3Db&x=1"


class Ui:
    """A UI that answers what it was asked, and the proxy before it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: list[web.BaseRequest] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(request)
        content = await request.read()
        headers = {"Set-Cookie": "_csrf=token", "X-Asked": request.headers.get("X-CSRF-Token", "")}
        return web.Response(text=f"{request.method} {request.raw_path} {content.decode()}", status=299, headers=headers)


@pytest.fixture
async def ui() -> AsyncIterator[Ui]:
    ui = Ui(f"127.0.0.1:{free_port()}")
    server = web.ServerRunner(web.Server(ui.answer))
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    try:
        async with ui_proxy(f"http://{ui.address}", "http://{}:{}".format(*server.addresses[0][:2])):
            yield ui
    finally:
        await server.cleanup()


async def ask(ui: Ui, method: str = "GET", **headers: str) -> tuple[int, str, aiohttp.ClientResponse]:
    url = URL(f"http://{ui.address}{PATH}", encoded=True)
    content = None if method == "GET" else "content"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers, data=content) as answer,
    ):
        return answer.status, await answer.text(), answer


async def test_what_the_ui_s_own_pages_send_passes_unchanged(ui: Ui) -> None:
    status, text, answer = await ask(ui)
    assert (status, text) == (299, f"GET {PATH} ")
    assert answer.headers["Set-Cookie"] == "_csrf=token"
    own = f"http://{ui.address}"
    status, text, answer = await ask(ui, "POST", **{"Origin": own, "X-CSRF-Token": "token"})
    assert (status, text, answer.headers["X-Asked"]) == (299, f"POST {PATH} content", "token")
    # A port that ssh forwards.
    for host in ("localhost:9999", "127.0.0.1:9999", "[::1]:9999", "localhost"):
        assert (await ask(ui, Host=host, Origin=f"http://{host}"))[0] == 299


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8233", "Origin": "http://evil.example:8233"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_what_other_pages_send_is_refused(ui: Ui, method: str, headers: dict[str, str]) -> None:
    assert (await ask(ui, method, **headers))[0] in (400, 403)
    assert ui.asked == []


async def test_a_ui_that_is_away_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with (
        ui_proxy(f"http://{address}", f"http://127.0.0.1:{free_port()}"),
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}/") as answer,
    ):
        assert answer.status == 502
        assert await answer.text() == "the Temporal server does not run; `perdure worker --detach`\n"


async def test_nothing_is_served_where_none_is_configured() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with ui_proxy(f"http://{address}", ""), aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"http://{address}/")


async def test_a_taken_port_keeps_no_worker_from_its_work(ui: Ui, caplog: pytest.LogCaptureFixture) -> None:
    async with ui_proxy(f"http://{ui.address}", "http://127.0.0.1:9"):
        assert "is not served" in caplog.text
    assert (await ask(ui))[0] == 299


async def test_a_browser_that_leaves_during_a_long_poll_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    asked, answers, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def poll(request: web.BaseRequest) -> web.Response:
        asked.set()
        await answers.wait()
        answered.set()
        return web.Response(text="news")

    server = web.ServerRunner(web.Server(poll))
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{free_port()}"
    try:
        async with ui_proxy(f"http://{address}", "http://{}:{}".format(*server.addresses[0][:2])):
            host, _, port = address.partition(":")
            _, leaving = await asyncio.open_connection(host, int(port))
            leaving.write(f"GET {PATH} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode())
            await asyncio.wait_for(asked.wait(), DEADLINE)
            leaving.close()
            await leaving.wait_closed()
            answers.set()
            await asyncio.wait_for(answered.wait(), DEADLINE)
            # The proxy still serves others.
            async with aiohttp.ClientSession() as session, session.get(f"http://{address}{PATH}") as answer:
                assert await answer.text() == "news"
    finally:
        await server.cleanup()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
