"""Tests of addresses: of both families where none is named, and joined with a port in one place."""

from __future__ import annotations

import ast
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from perdure.base.listening import listening_sockets
from perdure.base.metrics.endpoint import serving_metrics
from perdure_training.node_api.addresses import host_and_port, split_address
from tests.support.allocation import REPOSITORY
from tests.support.ports import has_ipv6

PACKAGES = ("perdure", "perdure_launcher", "perdure_training", "agent", "activities", "workflows")
JOINS = Path("perdure_training/node_api/addresses.py")


@pytest.fixture
def both_families() -> list[str]:
    """The addresses of loopback that this machine has."""
    return ["127.0.0.1", *(["::1"] if has_ipv6() else [])]


def test_without_a_host_it_listens_at_all_addresses_of_both_families(both_families: list[str]) -> None:
    sockets = listening_sockets("", 0)
    port = sockets[0].getsockname()[1]
    try:
        assert {one.getsockname()[1] for one in sockets} == {port}
        for address in both_families:
            socket.create_connection((address, port)).close()
    finally:
        for one in sockets:
            one.close()


def test_a_caller_over_ipv4_is_seen_with_its_own_address() -> None:
    sockets = listening_sockets("", 0)
    try:
        [own] = [one for one in sockets if one.family == socket.AF_INET]
        with socket.create_connection(("127.0.0.1", own.getsockname()[1])):
            own.setblocking(True)
            accepted, caller = own.accept()
            with closing(accepted):
                assert caller[0] == "127.0.0.1"
    finally:
        for one in sockets:
            one.close()


def test_a_host_that_is_named_is_the_only_one() -> None:
    [only] = listening_sockets("127.0.0.1", 0)
    with closing(only):
        assert only.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_port_that_is_taken_is_an_error_and_leaves_nothing_open(host: str) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken, pytest.raises(OSError, match="in use"):
        listening_sockets(host, taken.getsockname()[1])


def test_a_machine_without_ipv6_still_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(socket.AF_INET6, ("::", 0, 0, 0)), (socket.AF_INET, ("0.0.0.0", 0))]
    real = socket.socket

    def without_ipv6(family: int, *arguments: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *arguments)

    monkeypatch.setattr(
        "perdure.base.listening.socket.getaddrinfo",
        lambda *_, **__: [(family, socket.SOCK_STREAM, 6, "", place) for family, place in places],
    )
    monkeypatch.setattr("perdure.base.listening.socket.socket", without_ipv6)
    [only] = listening_sockets("", 0)
    with closing(only):
        assert only.family == socket.AF_INET


async def test_metrics_are_served_at_both_families(both_families: list[str]) -> None:
    async def collect() -> bytes:
        return b"perdure_jobs 1\n"

    async with serving_metrics(collect, 0) as port, aiohttp.ClientSession() as session:
        for address in both_families:
            async with session.get(f"http://{host_and_port(address, port or 0)}/metrics") as answer:
                assert answer.status == 200


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [("10.0.0.1", 7433, "10.0.0.1:7433"), ("fd00::1", 7433, "[fd00::1]:7433"), ("node.example", 1, "node.example:1")],
)
def test_a_host_and_a_port_are_one_text(host: str, port: int, text: str) -> None:
    assert host_and_port(host, port) == text
    assert split_address(text) == (host, port)


@pytest.mark.parametrize(("text", "host"), [(":7433", ""), ("::1:7433", "::1"), ("[::]:7433", "::")])
def test_a_text_without_a_host_or_without_brackets_is_read(text: str, host: str) -> None:
    assert split_address(text) == (host, 7433)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port", "host:70000", "host:-1"])
def test_a_text_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_address(text)


def test_one_place_joins_hosts_and_ports() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        if path.relative_to(REPOSITORY) != JOINS
        for line in _joined_by_hand(ast.parse(path.read_text()))
    ]
    assert found == [], "use host_and_port: an address of IPv6 needs brackets"


def _joined_by_hand(tree: ast.AST) -> Iterator[int]:
    """Yields the lines of texts such as f"{address}:{port}", whose host is no constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for host, colon, port in zip(node.values, node.values[1:], node.values[2:], strict=False):
                if (
                    isinstance(host, ast.FormattedValue)
                    and isinstance(colon, ast.Constant)
                    and colon.value == ":"
                    and isinstance(port, ast.FormattedValue)
                    and "port" in ast.unparse(port.value)
                ):
                    yield node.lineno
