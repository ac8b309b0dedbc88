"""Threads that serve connections beside a training."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from perdure_training.background import ConnectionThreads, Serve


class Service:
    """A socket of this machine, served by threads."""

    def __init__(self, serve: Serve, *, most: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._address = self._listening.getsockname()
        self._threads = ConnectionThreads(self._listening, serve, most=most, name="test")

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=30)

    def close(self) -> None:
        self._threads.close()


@pytest.fixture
def serving() -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(serve: Serve, *, most: int) -> Service:
        services.append(Service(serve, most=most))
        return services[-1]

    yield start
    for service in services:
        service.close()


def echo(connection: socket.socket, introduced: Callable[[], None]) -> None:
    introduced()
    connection.sendall(connection.recv(100))


def test_more_connections_than_may_be_are_closed_and_later_ones_served(serving: Callable[..., Service]):
    known, served = threading.Barrier(3), threading.Barrier(3)

    def wait(connection: socket.socket, introduced: Callable[[], None]) -> None:
        introduced()
        known.wait(30)
        served.wait(30)
        echo(connection, introduced)

    service = serving(wait, most=2)
    with service.connect() as one, service.connect() as two:
        known.wait(30)
        with service.connect() as third:
            assert third.recv(1) == b""
        served.wait(30)
        one.sendall(b"one")
        two.sendall(b"two")
        assert (one.recv(3), two.recv(3)) == (b"one", b"two")
        assert (one.recv(1), two.recv(1)) == (b"", b"")


def test_who_says_nothing_makes_room_for_who_proves_itself(serving: Callable[..., Service]):
    def ask(connection: socket.socket, introduced: Callable[[], None]) -> None:
        if connection.recv(100) == b"the secret":
            introduced()
            connection.sendall(b"yes")
            connection.recv(100)

    service = serving(ask, most=2)
    with service.connect() as known, service.connect() as silent:
        known.sendall(b"the secret")
        assert known.recv(3) == b"yes"
        with service.connect() as later:
            assert silent.recv(1) == b"", "the oldest that has proved nothing"
            later.sendall(b"the secret")
            assert later.recv(3) == b"yes"
            with service.connect() as too_many:
                assert too_many.recv(1) == b"", "nobody has to make room for it"
        known.sendall(b"done")
        assert known.recv(1) == b""


@pytest.mark.parametrize("error", [ConnectionError("the other side has gone"), ValueError("a defect")])
def test_an_error_ends_its_own_connection_and_a_defect_is_logged(
    serving: Callable[..., Service], caplog: pytest.LogCaptureFixture, error: Exception
):
    errors = [error]

    def fail_once(connection: socket.socket, introduced: Callable[[], None]) -> None:
        if errors:
            raise errors.pop()
        echo(connection, introduced)

    # With one connection at a time, the second one is served only if the first has made room.
    with caplog.at_level(logging.INFO):
        service = serving(fail_once, most=1)
        with service.connect() as first:
            assert first.recv(1) == b""
        echoed = b""
        while not echoed:
            with service.connect() as second:
                second.sendall(b"two")
                try:
                    echoed = second.recv(3)
                except ConnectionError:
                    # It came before the first one had made room.
                    continue
    assert echoed == b"two"
    assert [record.levelname for record in caplog.records] == ([] if isinstance(error, OSError) else ["ERROR"])


def test_a_service_that_is_closed_takes_no_connection(serving: Callable[..., Service]):
    service = serving(echo, most=1)
    service.close()
    with pytest.raises(ConnectionError):
        service.connect()
