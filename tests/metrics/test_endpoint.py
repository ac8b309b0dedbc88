"""Tests of the port for Prometheus: who gets an answer, and what becomes of scrapes in bad moments."""

from __future__ import annotations

import asyncio
import logging
import socket

import aiohttp
import pytest

from perdure.base.metrics.endpoint import serving_metrics
from tests.support.waiting import DEADLINE

TEXT = b"perdure_jobs 1\n"


async def collect() -> bytes:
    return TEXT


async def status(port: int, *, path: str = "/metrics", **headers: str) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer,
    ):
        if answer.status == 200:
            assert await answer.read() == TEXT
        return answer.status


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"Host": "localhost:9464"}, 200),
        ({"Host": "[::1]:9464"}, 200),
        ({"Host": "192.0.2.7"}, 200),
        ({"Host": "attacker.example:9464"}, 403),
        ({"Host": "localhost.attacker.example"}, 403),
        ({"Host": "127.0.0.1.attacker.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://attacker.example"}, 403),
    ],
)
async def test_no_page_reads_a_port_of_loopback(headers: dict[str, str], expected: int) -> None:
    async with serving_metrics(collect, 0) as port:
        assert port
        assert await status(port, **headers) == expected


async def test_there_is_one_path() -> None:
    async with serving_metrics(collect, 0) as port:
        assert port
        assert await status(port, path="/") == 404


async def test_what_an_error_says_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> bytes:
        raise RuntimeError("password=hunter2")

    async with (
        serving_metrics(fails, 0) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        assert answer.status == 500
        assert "hunter2" not in await answer.text()
    assert "a scrape failed" in caplog.text


async def test_a_scrape_during_the_shutdown_does_not_delay_it() -> None:
    entered, never = asyncio.Event(), asyncio.Event()

    async def hangs() -> bytes:
        entered.set()
        await never.wait()
        return TEXT

    async with asyncio.timeout(DEADLINE):
        async with serving_metrics(hangs, 0) as port:
            assert port
            scrape = asyncio.create_task(status(port))
            await entered.wait()
        with pytest.raises(aiohttp.ClientError):
            await scrape
        with pytest.raises(aiohttp.ClientError):
            await status(port)


async def test_scrapes_without_end_are_refused() -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def slow() -> bytes:
        entered.set()
        await go.wait()
        return TEXT

    async with serving_metrics(slow, 0) as port:
        assert port
        scrapes = [asyncio.create_task(status(port)) for _ in range(10)]
        done, _ = await asyncio.wait(scrapes, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result() for task in done} == {503}
        await entered.wait()
        go.set()
        results = await asyncio.gather(*scrapes)
        assert results.count(200) >= 1


async def test_a_port_that_is_taken_ends_only_those_that_need_it(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.ERROR):
            async with serving_metrics(collect, port, required=False) as served:
                assert served is None
        assert f"port {port}" in caplog.text
        with pytest.raises(OSError, match="in use"):
            async with serving_metrics(collect, port):
                pass
