"""Connections on which nothing is proven, and their bounds."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import grpc
import pytest

from perdure.base.credentials.names import GATEWAY_NAME
from perdure.gateway.calls import SERVICE
from perdure.gateway.connections import ConnectionBounds, Opened, host_of, superfluous
from tests.agent.harness import Workflows
from tests.gateway.site import GatewaySite
from tests.support.temporal_server import DevServer
from tests.support.waiting import DEADLINE

BOUNDS = ConnectionBounds(within=10.0, per_address=3, total=5, per_caller=2)


def opened(*ports: int, host: str = "ipv4:10.0.0.1", caller: str = "") -> list[Opened]:
    """Connections whose ports say when they began."""
    return [Opened(f"{host}:{port}", float(port), caller) for port in ports]


def closed(*found: Opened, now: float) -> set[int]:
    return {int(one.since) for one in superfluous(found, BOUNDS, now=now)}


def test_what_has_proven_nothing_in_time_is_closed() -> None:
    assert closed(*opened(1, 5), *opened(2, caller="a"), now=12.0) == {1}


def test_of_too_many_from_one_address_or_of_one_caller_the_oldest_are_closed() -> None:
    assert closed(*opened(1, 2, 3, 4, 5), *opened(6, host="ipv6:%5B::1%5D"), now=6.0) == {1, 2}
    assert closed(*opened(1, 2, 3, 4, caller="a"), *opened(5, 6, caller="b"), now=60.0) == {1, 2}


def test_a_network_of_ipv6_in_which_a_machine_has_any_number_of_addresses_counts_as_one() -> None:
    many = [one for port in range(1, 6) for one in opened(port, host=f"ipv6:%5B2001:db8:1:2::{port}%5D")]
    assert closed(*many, *opened(6, host="ipv6:%5B2001:db8:1:3::1%5D"), now=6.0) == {1, 2}


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:50000", "ipv4:10.0.0.1"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:50000", "ipv6:2001:db8:1:2::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:50000", "ipv6:10.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:50000", "ipv6:fe80::/64"),
        ("unix:/tmp/x:1", "unix:/tmp/x"),
    ],
)
def test_callers_are_counted_by_their_address_or_network(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_of_too_many_from_many_addresses_the_oldest_are_closed() -> None:
    many = [one for port in range(1, 9) for one in opened(port, host=f"ipv4:10.0.0.{port}")]
    assert closed(*many, now=8.0) == {1, 2, 3}


@pytest.fixture(params=["127.0.0.1", "[::1]"])
async def bounded(request: pytest.FixtureRequest, temporal_server: DevServer) -> AsyncIterator[GatewaySite]:
    site = GatewaySite(temporal_server)
    site.address = f"{request.param}:{site.address.rpartition(':')[2]}"
    site.bounds = ConnectionBounds(within=1.0, per_address=2, total=2, per_caller=2)
    site.interval = 0.1
    await site.start()
    try:
        yield site
    finally:
        await site.stop()


async def test_idle_connections_without_proof_end_and_an_agent_s_does_not(
    bounded: GatewaySite, workflows: Workflows
) -> None:
    trust = ssl.create_default_context(cadata=bounded.keyring.authority.certificate)
    trust.set_alpn_protocols(["h2"])
    host, _, port = bounded.address.rpartition(":")
    headers = bounded.headers(bounded.grant(workflows))
    writers: list[asyncio.StreamWriter] = []
    async with bounded.channel() as channel, asyncio.timeout(DEADLINE):
        call: Callable[..., Awaitable[bytes]] = channel.unary_unary(f"/{SERVICE}/GetSystemInfo")
        await call(b"", metadata=headers)
        ends: list[asyncio.Task[None]] = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection(
                host.strip("[]"), int(port), ssl=trust, server_hostname=GATEWAY_NAME
            )
            writers.append(writer)
            ends.append(asyncio.create_task(end_of(reader)))
        await asyncio.gather(*ends)
        assert channel.get_state() is grpc.ChannelConnectivity.READY, "the agent's connection was kept"
        await call(b"", metadata=headers)
    for writer in writers:
        writer.close()
    assert 'perdure_gateway_refused_total{reason="connection"} 8.0' in bounded.metrics.text().decode()


async def end_of(reader: asyncio.StreamReader) -> None:
    """Waits until the server closes a connection; its settings come first."""
    with suppress(OSError):
        while await reader.read(1024):
            pass
