"""Tests of the connection to a collector: it stays open, ends, leads through a proxy, and follows no one else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from perdure_training.events.connection import Connection
from tests.support.waiting import wait_for

WITHIN = 60.0


class Server(ThreadingHTTPServer):
    """Keeps the requests, each with the port of the connection that it came over."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[int, str, dict[str, str], bytes]] = []
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        self.ends_after: int | None = None
        """The number of requests after which a connection is ended, as servers do that with idle ones."""
        self.ended = threading.Event()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def shutdown_request(self, request: object) -> None:
        super().shutdown_request(request)  # pyrefly: ignore[bad-argument-type]
        self.ended.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.client_address[1], self.path, dict(self.headers), body))
        self.wfile.write(self.server.answer)
        self.close_connection = len(self.server.requests) == self.server.ends_after

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


def address(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/v1/logs?tenant=a"


@pytest.mark.parametrize(
    "answer", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
def test_requests_share_one_connection(server: Server, answer: bytes):
    server.answer = b"HTTP/1.1 200 OK\r\n" + answer
    connection = Connection(address(server), {"X-Tenant": "a"})
    for number in range(3):
        found = connection.post(b"body %d" % number, timeout=WITHIN)
        assert (found.status, found.body) == (200, b"{}")
    connection.close()
    assert len({port for port, *_ in server.requests}) == 1
    assert [body for *_, body in server.requests] == [b"body 0", b"body 1", b"body 2"]
    _, path, headers, _ = server.requests[0]
    assert (path, headers["X-Tenant"], headers["Host"]) == ("/v1/logs?tenant=a", "a", f"127.0.0.1:{server.port}")


def test_a_connection_that_the_server_ended_is_replaced(server: Server):
    server.ends_after = 1
    connection = Connection(address(server), {})
    connection.post(b"first", timeout=WITHIN)
    assert server.ended.wait(WITHIN)
    connection.post(b"second", timeout=WITHIN)
    connection.close()
    assert [body for *_, body in server.requests] == [b"first", b"second"]


def test_an_answer_that_is_too_long_does_not_become_the_next_one(server: Server):
    rest = b"HTTP/1.1 500 no\r\nContent-Length: 0\r\n\r\n"
    server.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (70_000 + len(rest)) + b"x" * 70_000 + rest
    connection = Connection(address(server), {})
    assert [connection.post(b"x", timeout=WITHIN).status for _ in range(2)] == [200, 200]
    connection.close()


def test_a_server_that_speaks_no_http_is_an_error_of_the_connection(server: Server):
    server.answer = b"SSH-2.0\r\n\r\n"
    with pytest.raises(OSError, match="BadStatusLine"):
        Connection(address(server), {}).post(b"x", timeout=WITHIN)


def test_a_forked_child_connects_anew(server: Server):
    connection = Connection(address(server), {})
    connection.post(b"parent", timeout=WITHIN)
    connection.forget()
    connection.post(b"child", timeout=WITHIN)
    connection.close()
    assert len({port for port, *_ in server.requests}) == 2


def test_the_environments_proxy_is_used_with_its_credential(server: Server, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", f"http://user:pass%20word@127.0.0.1:{server.port}")
    connection = Connection("http://collector.example:4318/v1/logs", {})
    connection.post(b"x", timeout=WITHIN)
    connection.close()
    [(_, path, headers, _)] = server.requests
    assert path == "http://collector.example:4318/v1/logs"
    assert headers["Host"] == "collector.example:4318"
    assert headers["Proxy-Authorization"] == "Basic dXNlcjpwYXNzIHdvcmQ="


def test_https_goes_through_the_proxy_by_a_tunnel(server: Server, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{server.port}")
    connection = Connection("https://collector.example/v1/logs", {"Authorization": "Bearer abc"})
    with pytest.raises(OSError, match="Tunnel connection failed: 501"):
        connection.post(b"x", timeout=WITHIN)
    wait_for(server.ended.is_set)
    assert server.requests == []


def test_a_header_that_would_begin_another_is_refused(server: Server):
    with pytest.raises(ValueError, match="control characters: 'X-Tenant'"):
        Connection(address(server), {"X-Tenant": "a\r\nX-Other: b"}).post(b"x", timeout=WITHIN)
    assert server.requests == []
