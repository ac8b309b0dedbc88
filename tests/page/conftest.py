"""A server of pages over played jobs, and a browser's part that has opened its link."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from perdure.page import looks, server
from perdure.page.server import serve_pages
from scripts.browser import ensure_browser
from tests.page.played import PlayedClient, PlayedJob, failed, interrupted
from tests.support.programs import Programs, report

SPEC = {"name": "llama", "roles": {"worker": {"command": ["torchrun", "train.py", "<script>"]}}}


async def spec_of_all(*_: object, **__: object) -> Mapping[str, Any]:
    return SPEC


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> PlayedClient:
    """Two jobs: one that was interrupted and steps again, and one that has failed."""
    monkeypatch.setattr(looks, "recorded_spec", spec_of_all)
    monkeypatch.setattr(looks, "_FULLY", timedelta())
    monkeypatch.setattr(server, "_INTERVAL", timedelta(seconds=0.05))
    monkeypatch.setattr(server, "_LIST_INTERVAL", timedelta(seconds=0.05))
    return PlayedClient(PlayedJob(interrupted()), PlayedJob(failed(), name="gpt"))


_PROGRAMS = Programs({"browser": lambda: ensure_browser(report)})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Installs the browser where a test asks for it."""
    _PROGRAMS.make(config, items)


@pytest.fixture(scope="session")
def browser() -> Path:
    """A real browser."""
    return _PROGRAMS.path("browser")


class Visitor:
    """What a browser does with the pages."""

    def __init__(self, link: str, session: aiohttp.ClientSession) -> None:
        self.link = URL(link)
        self.session = session

    def url(self, path: str) -> URL:
        return URL(f"{self.link.origin()}{path}", encoded=True)

    async def get(self, path: str, *, status: int = 200, **headers: str) -> str:
        async with self.session.get(self.url(path), headers=headers) as answer:
            assert answer.status == status
            return await answer.text()

    async def post(self, path: str, form: Mapping[str, str], *, status: int = 200, origin: str = "") -> str:
        headers = {"Origin": origin or str(self.link.origin())}
        async with self.session.post(self.url(path), data=dict(form), headers=headers) as answer:
            assert answer.status == status
            return await answer.text()

    async def hidden(self, path: str) -> dict[str, str]:
        """The hidden fields of the form that a page shows."""
        return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', await self.get(path)))


@pytest.fixture
async def stranger(client: PlayedClient) -> AsyncIterator[Visitor]:
    """A visitor without the token."""
    async with (
        serve_pages(client, port=0) as link,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
    ):
        yield Visitor(link, session)


@pytest.fixture
async def visitor(stranger: Visitor) -> Visitor:
    """A visitor who has opened the link."""
    async with stranger.session.get(stranger.link) as answer:
        assert answer.status == 200
        assert "token" not in str(answer.url)
    return stranger
