"""Tests with a simulated API server that refuses requests for a while, like a real one before it has read the roles."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.utils import Backoff

from perdure.base import kubernetes as api_module
from perdure.base.kubernetes import Changed, KubernetesApi, Listed
from perdure.base.kubernetes_errors import KubernetesError
from tests.support.played_api import played_api, refusal
from tests.support.waiting import DEADLINE

PODS = "/api/v1/namespaces/nlp/pods"
NOT_YET = 'pods is forbidden: User "worker" cannot list resource "pods" in API group "" in the namespace "nlp"'
CONFLICT = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'
QUOTA = 'pods "a" is forbidden: exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0'


@dataclass
class PlayedServer:
    """Answers requests for pods; each entry of `refusals` is spent on one request that `refuses` chooses."""

    refusals: list[str] = field(default_factory=list[str])
    refuses: Callable[[web.Request], bool] = lambda request: True
    asked: list[str] = field(default_factory=list[str])
    agents: set[str] = field(default_factory=set[str])
    expired: bool = False
    """It has forgotten each version that is to be watched from, as one that lags behind another one has."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        what = "WATCH" if request.query.get("watch") else request.method
        self.asked.append(what)
        self.agents.add(request.headers["User-Agent"])
        if self.refuses(request) and self.refusals:
            message = self.refusals.pop(0)
            return refusal(409, "Conflict", message) if message == CONFLICT else refusal(403, "Forbidden", message)
        if what == "WATCH" and self.expired:
            return refusal(410, "Expired", "too old resource version")
        if what == "WATCH":
            response = web.StreamResponse()
            await response.prepare(request)
            event = {"type": "ADDED", "object": {"metadata": {"name": "a", "resourceVersion": "2"}}}
            await response.write(json.dumps(event).encode() + b"\n")
            return response
        if what == "GET":
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})
        return web.json_response(await request.json())


def played(server: PlayedServer) -> AbstractAsyncContextManager[KubernetesApi]:
    return played_api(server.answer)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tries as there are, with shorter pauses."""
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=6, duration=0.01, factor=1.0))


async def test_a_server_that_has_not_read_its_roles_yet_is_asked_again() -> None:
    server = PlayedServer([NOT_YET, NOT_YET])
    async with played(server) as api:
        made: dict[str, Any] = await api.create(PODS, {"metadata": {"name": "a"}})
    assert made["metadata"]["name"] == "a"
    assert server.agents == {f"perdure/{version('perdure')}"}
    assert server.asked == ["POST"] * 3


async def test_a_creation_that_conflicts_with_others_in_a_quota_is_tried_again() -> None:
    server = PlayedServer([CONFLICT, CONFLICT])
    async with played(server) as api:
        await api.create(PODS, {"metadata": {"name": "a"}})
        assert server.asked == ["POST"] * 3
        server.refusals = [CONFLICT]
        with pytest.raises(KubernetesError, match="has been modified"):
            await api.patch(f"{PODS}/a", {})


async def test_a_right_that_is_lacking_is_told_after_a_few_tries() -> None:
    server = PlayedServer([NOT_YET] * 100)
    async with played(server) as api:
        with pytest.raises(KubernetesError, match="cannot list resource"):
            await api.list(PODS)
    assert server.asked == ["GET"] * 6


async def test_a_quota_is_told_at_once_since_only_time_helps() -> None:
    server = PlayedServer([QUOTA])
    async with played(server) as api:
        with pytest.raises(KubernetesError, match="exceeded quota"):
            await api.create(PODS, {"metadata": {"name": "a"}})
    assert server.asked == ["POST"]


async def test_a_watch_outlasts_a_refusal_and_what_it_missed_is_not_listed_again() -> None:
    server = PlayedServer([NOT_YET, NOT_YET], refuses=lambda request: "watch" in request.query)
    async with played(server) as api, aclosing(api.follow(PODS)) as changes:
        assert await anext(changes) == Listed(())
        assert isinstance(await anext(changes), Changed)
    assert server.asked[:4] == ["GET", "WATCH", "WATCH", "WATCH"]


async def test_a_watch_that_the_server_ends_at_once_is_begun_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_module, "_FIRST_PAUSE", 0.1)
    server = PlayedServer()
    async with played(server) as api, aclosing(api.follow(PODS)) as changes:
        assert await anext(changes) == Listed(())
        began = time.monotonic()
        for _ in range(5):
            assert isinstance(await anext(changes), Changed)
        assert time.monotonic() - began >= 4 * 0.1


async def test_a_list_whose_version_has_always_expired_is_requested_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_module, "_FIRST_PAUSE", 0.1)
    server = PlayedServer(expired=True)
    async with played(server) as api, aclosing(api.follow(PODS)) as changes:
        assert await anext(changes) == Listed(())
        began = time.monotonic()
        for _ in range(4):
            assert await anext(changes) == Listed(())
        assert time.monotonic() - began >= 4 * 0.1


@pytest.mark.parametrize("says", [True, False], ids=["refuses the watch", "tells nothing"])
async def test_a_server_that_was_set_back_to_a_backup_is_listed_again(
    says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its versions begin below the one that is watched from."""
    monkeypatch.setattr(api_module, "_WATCH_TIMEOUT", aiohttp.ClientTimeout(sock_read=0.1))
    versions = ["100", "50"]
    watched: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if not request.query.get("watch"):
            found = {"metadata": {"name": f"at-{versions[0]}"}}
            return web.json_response({"metadata": {"resourceVersion": versions.pop(0)}, "items": [found]})
        watched.append(request.query["resourceVersion"])
        if says and not versions:
            await asyncio.Event().wait()
        if says:
            return refusal(504, "Timeout", "Timeout: Too large resource version: 100, current: 50")
        response = web.StreamResponse()
        await response.prepare(request)
        if not versions:
            event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "50"}}}
            await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.Event().wait()
        return response

    async with asyncio.timeout(DEADLINE / 4), played_api(answer) as api, aclosing(api.follow(PODS)) as changes:
        for version_of_list in ("100", "50"):
            assert await anext(changes) == Listed(({"metadata": {"name": f"at-{version_of_list}"}},))
    assert watched == ["100"]


async def test_a_watch_that_is_forbidden_for_good_ends_and_the_log_names_the_right_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_module, "_REFUSAL_IS_FINAL", 0.1)
    server = PlayedServer([NOT_YET] * 100, refuses=lambda request: "watch" in request.query)
    async with played(server) as api:
        for _ in range(2):
            async with aclosing(api.follow(PODS)) as changes:
                assert await anext(changes) == Listed(())
                with pytest.raises(KubernetesError, match="cannot list resource"):
                    await anext(changes)
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"{PODS} may be listed and not watched" in said
    assert "grant the verb watch" in said
    assert server.asked.count("WATCH") > 1


async def test_a_server_that_wants_to_be_left_alone_for_long_is_asked_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_module, "_LONGEST_WAIT", 0.1, raising=False)
    server, away = PlayedServer(), ["GET", "WATCH"]

    async def answer(request: web.Request) -> web.StreamResponse:
        if away and away[0] == ("WATCH" if request.query.get("watch") else request.method):
            away.pop(0)
            return web.Response(status=503, text="maintenance", headers={"Retry-After": "3600"})
        return await server.answer(request)

    async with asyncio.timeout(DEADLINE / 4), played_api(answer) as api, aclosing(api.follow(PODS)) as changes:
        assert await anext(changes) == Listed(())
        assert isinstance(await anext(changes), Changed)
    assert not away
