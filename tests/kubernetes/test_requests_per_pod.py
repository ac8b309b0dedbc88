"""Tests of what the nodes of a large job cost the API server, which all jobs of a cluster share: a played one counts
its requests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from aiohttp import web

from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.base.kubernetes import KubernetesApi
from scripts.cluster.host_programs import SITE_POLICY
from tests.kubernetes.pods import PodJob, TestCluster
from tests.support.played_api import played_server, refusal, write_kubeconfig

NODES = 64


class PlayedStore:
    """An API server that keeps objects by their paths, and removes what is deleted at once."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._version = 0
        self._removed: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        plural = request.path.split("/")[5]
        watch = " watch" if request.query.get("watch") else ""
        self.requests[f"{request.method} {plural}{watch}"] += 1
        match request.method:
            case "POST":
                content = await request.json()
                return await self._put(f"{request.path}/{content['metadata']['name']}", content, new=True)
            case "PATCH" if request.path in self.objects:
                return await self._put(request.path, merge(self.objects[request.path], await request.json()))
            case "DELETE" if request.path in self.objects:
                removed = self.objects.pop(request.path)
                self._removed.append(removed)
                async with self._changed:
                    self._changed.notify_all()
                return web.json_response(removed)
            case "GET" if watch:
                return await self._watch(request)
            case "GET" if request.path in self.objects:
                return web.json_response(self.objects[request.path])
            case "GET" if request.path.endswith(f"/{plural}"):
                items = [one for path, one in self.objects.items() if path.startswith(f"{request.path}/")]
                return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})
            case _:
                return refusal(404, "NotFound", request.path)

    async def _put(self, path: str, content: dict[str, Any], *, new: bool = False) -> web.Response:
        if new and path in self.objects:
            return refusal(409, "AlreadyExists", path)
        self._version += 1
        metadata = {"resourceVersion": str(self._version), "uid": path, "namespace": "nlp"}
        made = {**content, "metadata": {"uid": path, **content["metadata"], **metadata}}
        self.objects[path] = made
        return web.json_response(made)

    async def _watch(self, request: web.Request) -> NoReturn:
        response = web.StreamResponse()
        await response.prepare(request)
        told = 0
        while True:
            for one in self._removed[told:]:
                await response.write(json.dumps({"type": "DELETED", "object": one}).encode() + b"\n")
            told = len(self._removed)
            async with self._changed:
                await self._changed.wait_for(lambda told=told: len(self._removed) > told)


@pytest.fixture
async def store() -> PlayedStore:
    return PlayedStore()


@pytest.fixture
async def kubeconfig(store: PlayedStore, tmp_path: Path) -> AsyncIterator[Path]:
    async with played_server(store.answer) as server:
        yield write_kubeconfig(tmp_path / "kubeconfig", server, token="t")


@pytest.mark.parametrize("limited", [False, True], ids=["unlimited", "with a limit on nodes"])
async def test_a_node_costs_few_requests_however_many_the_job_has(
    limited: bool, store: PlayedStore, kubeconfig: Path
) -> None:
    policy = SitePolicy.parse(SITE_POLICY)
    if limited:
        policy = policy.model_copy(update={"max_nodes": NODES})
    worker: KubernetesBackend = TestCluster(str(kubeconfig), "perdure:1", None).backend(policy=policy)
    job = PodJob(cast(KubernetesApi, None), "nlp")
    try:
        await asyncio.gather(*(worker.create(job.request(rank)) for rank in range(NODES)))
        created, store.requests = store.requests, Counter()
        assert created.pop("POST pods") == NODES
        # The job's anchor, and where nodes are limited one list and two changes of the ledger for each pod.
        assert created.total() <= (4 + 2 * NODES if limited else 2), created
        assert created["GET pods"] == int(limited)
        left = await worker.delete(*(job.ref(rank, winding_down=True) for rank in range(NODES)))
        assert not left
        deleted = store.requests
        assert deleted.pop("DELETE pods") == NODES
        # The rest are lists and watches of many pods, and the anchor's end.
        assert deleted.total() <= 10, deleted
    finally:
        await worker.close()
    assert not [path for path in store.objects if "perdure-limits" not in path]
