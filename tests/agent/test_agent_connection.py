"""Whether a node finds out that it does not get to another one."""

from __future__ import annotations

import socket

import pytest

from agent.connection import why_cut_off


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_who_listens_is_reached_and_who_does_not_is_named(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((address, 0))
        port = listening.getsockname()[1]
        assert f"{address} port {port} cannot be reached: " in await why_cut_off(address, port)
        listening.listen(1)
        assert await why_cut_off(address, port) == ""


async def test_a_name_that_nobody_knows_is_no_accident() -> None:
    assert "nobody.invalid port 1 cannot be reached: " in await why_cut_off("nobody.invalid", 1)
