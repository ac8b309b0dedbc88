"""Lines of jobs that print on: a page reads them for as long as it is open, and no faster than its browser does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import pytest

from perdure.client.logs import LogLine
from perdure.page import answers
from tests.page.conftest import Visitor
from tests.page.played import PlayedClient
from tests.page.test_pages import JOB, stream
from tests.support.waiting import DEADLINE, eventually


class PrintingClient(PlayedClient):
    """Its jobs print, and do not end."""

    quiet = False
    """They print one line only."""
    line = "step 1 loss 2.0"
    read = 0
    """Lines that were read."""

    def __init__(self, *jobs: Any) -> None:
        super().__init__(*jobs)
        self.let_go = asyncio.Event()
        """Nobody reads any more."""

    async def logs(self, name: str, *, namespace: str | None = None, **chosen: Any) -> AsyncGenerator[LogLine]:
        try:
            while True:
                yield LogLine(role="worker", node=0, incarnation=1, text=self.line, time=datetime.now(UTC))
                self.read += 1
                await asyncio.sleep(DEADLINE * 2 if self.quiet else 0)
        finally:
            self.let_go.set()


@pytest.fixture
def client(client: PlayedClient) -> PrintingClient:
    return PrintingClient(*client.jobs.values())


@pytest.mark.parametrize("quiet", [False, True], ids=["prints", "is quiet"])
async def test_the_log_of_a_page_that_was_closed_is_read_no_longer(
    visitor: Visitor, client: PrintingClient, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    monkeypatch.setattr(answers, "ALIVE", 0.05)
    client.quiet = quiet
    async with aclosing(stream(visitor, f"{JOB}lines")) as coming:
        assert client.line in (await anext(coming))[0]
    visitor.session.cookie_jar.clear()
    await visitor.session.close()
    async with asyncio.timeout(DEADLINE):
        await client.let_go.wait()


async def test_a_browser_that_takes_no_lines_has_no_further_ones_read(visitor: Visitor, client: PrintingClient) -> None:
    client.line = "x" * 20_000

    async def stands_still() -> bool:
        before = client.read
        await asyncio.sleep(1)
        return before == client.read > 0

    async with visitor.session.get(visitor.url(f"{JOB}lines")):
        await eventually(stands_still, what="the log is read although nobody takes its lines")
