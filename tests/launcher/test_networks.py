"""Tests of worlds on users' networks: several interfaces, IPv6, firewalls that leave few ports open."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator

import pytest

from perdure_launcher.system.interfaces import interface_of
from tests.launcher.hosts import Host, two_hosts, unavailable
from tests.launcher.nodes import (
    ENTERED,
    EXITED,
    READY,
    TORCHRUN,
    Node,
    all_ready,
    all_step,
    first_world,
    form_world,
    running,
)
from tests.launcher.test_env_mode import ENV_READY

pytestmark = [pytest.mark.usefixtures("ranks"), pytest.mark.timeout(300), pytest.mark.long("launchers")]

BOTH_MODES = pytest.mark.parametrize(
    ("command", "path"),
    [([*TORCHRUN, "train.py"], READY), ([sys.executable, "-u", "env_train.py"], ENV_READY)],
    ids=["torchrun", "env"],
)


@pytest.fixture
def free_ports() -> range:
    """Sixteen ports that nothing uses, below those that the system gives out by itself."""
    while True:
        first = 20_000 + secrets.randbelow(10_000)
        found = range(first, first + 16)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in found:
                stack.enter_context(socket.create_server(("::1", port), family=socket.AF_INET6))
            return found


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if reason := unavailable():
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.mark.parametrize("addresses", [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")], ids=["IPv4", "IPv6"])
async def test_hosts_whose_first_interface_leads_nowhere(hosts: tuple[Host, Host], addresses: tuple[str, str]) -> None:
    nodes: list[Node] = []
    for host, address in zip(hosts, addresses, strict=True):
        host.give(address, "eth1")
        node = Node([*TORCHRUN, "train.py"], nodes="2", run_id="pair", address=address)
        node.placed_by = host.entry
        nodes.append(node)
    async with running(*nodes):
        ready = await first_world(nodes)
        os.kill(nodes[0].ranks(1)[0], signal.SIGKILL)
        await nodes[0].agent.heard(READY, lambda body: body["after_generation"] == 1)
        await form_world(nodes, 2, port=ready[0].body["store_ports"][1])
        await all_step(nodes, 2)


@BOTH_MODES
async def test_stores_take_their_ports_of_a_range_in_turn(command: list[str], path: str, free_ports: range) -> None:
    """Uses the machine's own IPv6 address throughout."""
    allowed = f"{free_ports[0]}-{free_ports[-1]}"
    nodes = [Node(command, nodes="2", run_id="pair", address="::1", store_ports=allowed) for _ in range(2)]
    async with running(*nodes):
        ready = await all_ready(*nodes, path=path)
        offered = [port for post in ready for port in post.body["store_ports"]]
        assert len(set(offered)) == len(offered) == 8, "nodes of one machine share the range"
        assert set(offered) <= set(free_ports)
        first, second, *_ = ready[0].body["store_ports"]
        await form_world(nodes, 1, port=first)
        await all_step(nodes, 1)
        entered = await nodes[0].agent.heard(ENTERED)
        assert first not in entered.body["store_ports"]
        assert len(entered.body["store_ports"]) == 4
        await form_world(nodes, 2, port=second)
        await all_step(nodes, 2)


@BOTH_MODES
async def test_a_range_without_a_free_port_is_named(command: list[str], path: str, free_ports: range) -> None:
    taken = [socket.create_server(("127.0.0.1", port)) for port in free_ports]
    node = Node(command, store_ports=f"{free_ports[0]}-{free_ports[-1]}")
    async with running(node):
        exited = await node.agent.heard(EXITED)
        assert exited.body["exit_code"] not in (None, 0)
        reason = f"none of the ports {free_ports[0]}-{free_ports[-1]} is free for the world's store (Address already in"
        assert exited.body["message"].startswith(reason)
        assert "network.store_ports" in exited.body["message"]
        assert reason in exited.body["log_tail"]
        assert node.agent.said(path) == []
        # What is free again is found.
        for server in taken:
            server.close()
        await node.agent.want(attempt=2)
        await all_ready(node, path=path)


def test_the_interface_of_an_address_is_found() -> None:
    assert [interface_of(address) for address in ("127.0.0.1", "::1", "localhost")] == ["lo"] * 3
    assert [interface_of(address) for address in ("203.0.113.7", "no-such-host.invalid")] == [None, None]
