"""Tests of the check that a node can connect to another one."""

from __future__ import annotations

import socket

import pytest

from perdure.agent.connection import why_cut_off


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_a_machine_that_answers_is_reached_whether_or_not_anybody_listens(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listening:
        listening.bind((address, 0))
        port = listening.getsockname()[1]
        assert await why_cut_off(address, port) == ""
        listening.listen(1)
        assert await why_cut_off(address, port) == ""


@pytest.mark.parametrize("address", ["255.255.255.255", "no-host.invalid"])
async def test_one_that_cannot_be_reached_is_named(address: str) -> None:
    assert f"{address} port 1 cannot be reached: " in await why_cut_off(address, 1)
