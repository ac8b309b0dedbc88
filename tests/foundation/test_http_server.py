"""Tests of the small HTTP server of agents: what its clients may send, and what they get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

import pytest

from perdure.base import http_server
from perdure.base.http_server import HttpServer, Refused, Request, Response
from tests.support.waiting import DEADLINE

LARGEST = 100_000


async def echo(request: Request) -> Response:
    return Response(body=request.body or request.path.encode())


async def refuse(request: Request) -> Response:
    raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "not now")


async def fail(request: Request) -> Response:
    raise RuntimeError("password=hunter2")


class Hanging:
    """A handler that never answers."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, method: str, path: str, body: bytes = b"", *, head: str = "") -> tuple[int, bytes]:
        self.send(method, path, body, head=head)
        return await self.answer()

    def send(self, method: str, path: str, body: bytes = b"", *, head: str = "") -> None:
        self.writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body
        )

    async def answer(self) -> tuple[int, bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return int(head.split()[1]), await self.reader.readexactly(length)


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncGenerator[int]:
    listening = await asyncio.get_running_loop().create_server(server.accept, "127.0.0.1", 0)
    try:
        async with asyncio.timeout(DEADLINE):
            yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        server.close()


@asynccontextmanager
async def connected(port: int) -> AsyncGenerator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


def http(**settings: int) -> HttpServer:
    handlers = {("POST", "/echo"): echo, ("GET", "/names/"): echo, ("GET", "/no"): refuse, ("GET", "/fails"): fail}
    given: dict[str, Any] = {"largest_body": LARGEST, "most_connections": 8, **settings}
    return HttpServer(handlers=handlers, **given)


@pytest.mark.parametrize(
    ("method", "path", "status", "content"),
    [
        ("POST", "/echo", 200, b"body"),
        ("GET", "/names/a%20b", 200, b"body"),
        ("GET", "/names/", 404, b"/names/: Not Found"),
        ("GET", "/names/a/b", 404, b"/names/a/b: Not Found"),
        ("GET", "/echo", 405, b"/echo: Method Not Allowed"),
        ("GET", "/no", 503, b"/no: not now"),
        ("GET", "/fails", 500, b"/fails: Internal Server Error"),
    ],
)
async def test_a_request_is_answered_and_the_next_one_on_its_connection_too(
    method: str, path: str, status: int, content: bytes
) -> None:
    async with serving(http()) as port, connected(port) as client:
        found, body = await client.ask(method, path, b"body")
        assert found == status
        assert content in body
        assert await client.ask("POST", "/echo", b"again") == (200, b"again")


async def test_an_answer_to_head_has_no_body() -> None:
    async with serving(http()) as port, connected(port) as client:
        client.send("HEAD", "/echo?a=b")
        assert b" 405 " in await client.reader.readuntil(b"\r\n\r\n")
        assert await client.ask("POST", "/echo", b"again") == (200, b"again")


async def test_a_client_that_sends_too_much_reads_why_and_may_send_less() -> None:
    async with serving(http()) as port, connected(port) as client:
        status, body = await client.ask("POST", "/echo", bytes(5 * LARGEST))
        assert (status, body) == (413, b'{"error": "/echo: Request Entity Too Large"}')
        assert await client.ask("POST", "/echo", bytes(LARGEST)) == (200, bytes(LARGEST))


async def test_a_body_in_pieces_and_one_that_waits_for_leave_are_taken() -> None:
    async with serving(http()) as port, connected(port) as client:
        client.writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        client.writer.write(b"1\r\nc\r\n0\r\n\r\n")
        assert await client.answer() == (200, b"abc")
        client.writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n")
        assert b" 100 " in await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write(b"d")
        assert await client.answer() == (200, b"d")


async def test_who_does_not_send_the_announced_body_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_BODY", 0.2)
    async with serving(http(most_connections=1)) as port, connected(port) as silent:
        silent.writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc")
        assert await silent.reader.read() == b""
        async with connected(port) as client:
            assert await client.ask("POST", "/echo", b"a") == (200, b"a")


async def test_requests_that_come_at_once_are_answered_in_their_order() -> None:
    async with serving(http()) as port, connected(port) as client:
        for number in range(50):
            client.send("POST", "/echo", str(number).encode())
        assert [await client.answer() for _ in range(50)] == [(200, str(number).encode()) for number in range(50)]


@pytest.mark.parametrize(
    "content", [b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET /echo HTTP/1.1\r\nA: " + b"a" * LARGEST + b"\r\n\r\n"]
)
async def test_what_is_no_request_ends_its_connection_without_a_line_in_the_log(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(http()) as port, connected(port) as client:
        client.writer.write(content)
        assert (await client.answer())[0] in (400, 431)
        with suppress(ConnectionError):
            assert await client.reader.read() == b""
    assert caplog.records == []


async def test_what_an_error_says_is_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(http()) as port, connected(port) as client:
        assert b"hunter2" not in (await client.ask("GET", "/fails"))[1]
    assert "hunter2" in caplog.text


async def test_who_leaves_waits_no_longer() -> None:
    hanging = Hanging()
    server = HttpServer(handlers={("GET", "/"): hanging, ("GET", "/a"): hanging}, largest_body=1, most_connections=8)
    async with serving(server) as port:
        async with connected(port) as client:
            client.send("GET", "/a")
            await hanging.began.wait()
        await hanging.ended.wait()
        while server.open:
            await asyncio.sleep(0)


async def test_connections_beyond_the_most_are_closed_at_once() -> None:
    async with serving(http(most_connections=1)) as port, connected(port) as first:
        assert (await first.ask("POST", "/echo", b"a"))[0] == 200
        async with connected(port) as second:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await second.ask("POST", "/echo", b"a")
        assert (await first.ask("POST", "/echo", b"a"))[0] == 200


async def test_a_connection_that_is_idle_yields_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_YIELDS", 0.0)
    async with serving(http(most_connections=2)) as port, connected(port) as older, connected(port) as newer:
        assert (await newer.ask("POST", "/echo", b"a"))[0] == 200
        # Bytes of a head are no request.
        older.writer.write(b"POST /ec")
        assert (await newer.ask("POST", "/echo", b"a"))[0] == 200
        async with connected(port) as third:
            assert (await third.ask("POST", "/echo", b"a"))[0] == 200
            assert await older.reader.read() == b""
            assert (await newer.ask("POST", "/echo", b"a"))[0] == 200


async def test_a_connection_with_a_request_in_progress_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_YIELDS", 0.0)
    hanging = Hanging()
    server = HttpServer(handlers={("GET", "/a"): hanging}, largest_body=1, most_connections=1)
    async with serving(server) as port, connected(port) as first:
        first.send("GET", "/a")
        await hanging.began.wait()
        async with connected(port) as second:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await second.ask("GET", "/a")
        assert not hanging.ended.is_set()
