"""Tests of the sign by which a serving command is known to be ready, against real sockets."""

from __future__ import annotations

import asyncio

import pytest

from perdure.agent.readiness import answers
from perdure.spec.readiness import Readiness

HOST = "127.0.0.1"


@pytest.mark.parametrize(
    ("answer", "path", "ready"),
    [
        (b"", None, True),
        (b"HTTP/1.1 200 OK\r\n\r\n", "/health", True),
        (b"HTTP/1.0 204 No Content\r\n\r\n", "/health", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "/health", False),
        (b"", "/health", False),
        (b"2" * 100_000, "/health", False),
        (b"\xff\x00\n", "/health", False),
    ],
)
async def test_a_command_is_ready_when_it_answers(answer: bytes, path: str | None, ready: bool):
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path is not None:
            asked.append(await reader.readuntil(b"\r\n"))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await answers(HOST, Readiness(port=port, http=path)) is ready
    assert asked == ([b"GET /health HTTP/1.1\r\n"] if path else [])


async def test_a_command_that_does_not_listen_is_not_ready():
    server = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    assert not await answers(HOST, Readiness(port=port))
