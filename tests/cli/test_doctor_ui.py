"""Tests of `perdure doctor` with the page of Temporal, where the environment names a proxy for the internet."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator

import pytest

from perdure.base.metrics.endpoint import serving_metrics
from perdure.cli.checks import Verdict, check_ui
from perdure.client.connection import Endpoint


@pytest.fixture
async def proxied(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """The requests that a proxy gets, which answers all of them."""
    requests: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        requests.append(head.split()[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    proxy = await asyncio.start_server(answer, "127.0.0.1", 0)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # An opener of this process knows the proxies of the time when it was made.
    monkeypatch.setattr(urllib.request, "_opener", None)
    yield requests
    proxy.close()


def endpoint(ui: str) -> Endpoint:
    return Endpoint(address="127.0.0.1:7233", ui=ui)


async def nothing() -> bytes:
    return b""


async def test_a_page_on_this_machine_is_reached_directly(proxied: list[str]) -> None:
    async with serving_metrics(nothing, 0, host="127.0.0.1") as port:
        found = await check_ui(endpoint(f"http://127.0.0.1:{port}/metrics"))
    assert found.verdict is Verdict.OK
    # Others of this process may send something, too.
    assert not [url for url in proxied if url.endswith("/metrics")]


@pytest.mark.parametrize("host", ["temporal-ui", "temporal-ui.perdure.svc", "ui.perdure.svc.cluster.local"])
async def test_a_page_in_a_cluster_is_not_asked_for_at_the_proxy(proxied: list[str], host: str) -> None:
    await check_ui(endpoint(f"http://{host}:1/"))
    assert proxied == []


async def test_a_page_elsewhere_is_reached_through_the_proxy(proxied: list[str]) -> None:
    assert (await check_ui(endpoint("http://temporal.example/"))).verdict is Verdict.OK
    assert proxied == ["http://temporal.example/"]
