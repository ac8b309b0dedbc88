"""Tests of credentials that expire while a worker or an operator outside of a cluster runs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.utils import Backoff

from perdure.base import kubernetes as api_module
from perdure.base.kubernetes import KubernetesApi, KubernetesError
from tests.support.played_api import played_server, refusal

PODS = "/api/v1/namespaces/nlp/pods"
PLUGIN = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
with (folder / "calls").open("a") as calls:
    calls.write("called\\n")
credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
print(json.dumps({**credential, "status": {"token": (folder / "token").read_text()}}))
"""


class Site:
    """A server that accepts one token, and a kubeconfig whose program returns what a file has."""

    def __init__(self, folder: Path) -> None:
        self.accepted = "first"
        self._folder = folder
        self.offer("first")
        self.kubeconfig = folder / "kubeconfig"
        (folder / "plugin.py").write_text(PLUGIN)

    def offer(self, token: str) -> None:
        (self._folder / "token").write_text(token)

    @property
    def calls(self) -> int:
        return len((self._folder / "calls").read_text().splitlines())

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.accepted}":
            return refusal(401, "Unauthorized", "Unauthorized")
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    def write_kubeconfig(self, server: str) -> None:
        program = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(self._folder / "plugin.py"), str(self._folder)],
            "interactiveMode": "Never",
        }
        content = {
            "current-context": "site",
            "contexts": [{"name": "site", "context": {"cluster": "site", "user": "worker"}}],
            "clusters": [{"name": "site", "cluster": {"server": server}}],
            "users": [{"name": "worker", "user": {"exec": program}}],
        }
        self.kubeconfig.write_text(json.dumps(content))


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=3, duration=0.01, factor=1.0))
    made = Site(tmp_path)
    async with played_server(made.answer) as server:
        made.write_kubeconfig(server)
        yield made


async def test_a_token_that_expires_is_requested_again_once_for_all_requests(site: Site) -> None:
    api = await KubernetesApi.connect(str(site.kubeconfig))
    try:
        assert await api.list(PODS) == []
        site.accepted = "second"
        site.offer("second")
        assert await asyncio.gather(*(api.list(PODS) for _ in range(8))) == [[]] * 8
    finally:
        await api.close()
    assert site.calls == 2


async def test_a_refusal_of_good_credentials_starts_no_storm_of_programs(site: Site) -> None:
    api = await KubernetesApi.connect(str(site.kubeconfig))
    site.accepted = "none that the program has"
    try:
        answers = await asyncio.gather(*(api.list(PODS) for _ in range(8)), return_exceptions=True)
    finally:
        await api.close()
    assert all(isinstance(answer, KubernetesError) and answer.status == 401 for answer in answers)
    assert site.calls == 2


async def test_a_kubeconfig_that_cannot_be_read_again_leaves_the_refusal(site: Site) -> None:
    api = await KubernetesApi.connect(str(site.kubeconfig))
    site.accepted = "second"
    site.kubeconfig.write_text("{half: ")
    try:
        with pytest.raises(KubernetesError, match="Unauthorized"):
            await api.list(PODS)
    finally:
        await api.close()
