"""Tests with a simulated API server whose pods are kept by finalizers of programs that are gone: a job ends anyway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.naming import INCARNATION, LEAVING, NAMED, OURS, RANK, ROLE, UID
from perdure.contract import NodeRef
from tests.support.played_api import played_server, refusal, write_kubeconfig
from tests.support.waiting import DEADLINE

NODE = NodeRef(
    name="job-worker-0-0123abcd1",
    uid="0123abcd",
    role="worker",
    rank=0,
    incarnation=1,
    backend="kubernetes",
    namespace="nlp",
    grace=timedelta(seconds=1),
    winding_down=True,
)
LABELS = {**OURS, UID: NODE.uid, ROLE: NODE.role, RANK: "0", INCARNATION: "1"}


class KeptPod:
    """A pod that ends once it is deleted, and whose finalizer nobody removes; and its job's ConfigMap."""

    def __init__(self) -> None:
        self.phase = "Running"
        self.affinity: dict[str, Any] = {}
        self.labels = dict(LABELS)
        self.changes: list[tuple[str, Any]] = []
        """The method and the labels of each request that changes the pod."""
        self.refuses_changes = False
        self.deleting = asyncio.Event()
        self.anchors = ["perdure-job-0123abcd"]

    @property
    def pod(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": NODE.name, "uid": "u", "labels": self.labels, "resourceVersion": "2"}
        metadata["finalizers"] = ["kopf.zalando.org/KopfFinalizerMarker"]
        if self.deleting.is_set():
            metadata["deletionTimestamp"] = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        spec = {"nodeName": "gpu-1", "affinity": self.affinity}
        return {"metadata": metadata, "spec": spec, "status": {"phase": self.phase}}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.split("/")[5]
        if kind == "pods" and request.method in ("PATCH", "DELETE"):
            content = await request.json() if request.method == "PATCH" else {"metadata": {}}
            self.changes.append((request.method, content["metadata"].get("labels")))
            if request.method == "PATCH":
                if self.refuses_changes:
                    return refusal(403, "Forbidden", 'User "worker" cannot patch pods')
                return web.json_response(self.pod)
        if request.method == "DELETE":
            if kind == "configmaps":
                self.anchors.clear()
            self.deleting.set()
            return web.json_response({"kind": "Status", "status": "Success"})
        if request.query.get("watch"):
            return await self._end(request)
        found = [{"metadata": {"name": name, "uid": "c"}} for name in self.anchors]
        items = found if kind == "configmaps" else [self.pod]
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})

    async def _end(self, request: web.Request) -> web.StreamResponse:
        """Its machine ends it a moment later; the API server keeps the object."""
        response = web.StreamResponse()
        await response.prepare(request)
        self.phase = "Failed"
        await response.write(json.dumps({"type": "MODIFIED", "object": self.pod}).encode() + b"\n")
        await asyncio.Event().wait()
        return response


@pytest.fixture
async def kept() -> KeptPod:
    return KeptPod()


@pytest.fixture
async def backend(kept: KeptPod, tmp_path: Path) -> AsyncIterator[KubernetesBackend]:
    async with played_server(kept.answer) as server:
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", server)
        backend = KubernetesBackend(KubernetesSettings(agent_image="perdure:1"), kubeconfig=str(kubeconfig))
        yield backend
        await backend.close()


async def test_a_pod_that_has_ended_and_is_kept_by_a_foreign_finalizer_is_deleted(
    backend: KubernetesBackend, kept: KeptPod
) -> None:
    async with asyncio.timeout(DEADLINE / 4):
        await backend.delete(NODE)
    assert kept.phase == "Failed", "its processes have ended before"
    assert not kept.anchors, "nothing else of the job is left"


NEAR_OTHERS = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}]}}


async def test_a_pod_loses_its_name_before_it_is_deleted(backend: KubernetesBackend, kept: KeptPod) -> None:
    kept.labels = {**LABELS, NAMED: "true"}
    async with asyncio.timeout(DEADLINE / 4):
        await backend.delete(NODE)
    assert kept.changes == [("PATCH", {NAMED: None}), ("DELETE", None)]


@pytest.mark.parametrize("refused", [False, True])
async def test_nothing_is_placed_near_a_pod_once_it_is_to_go(
    backend: KubernetesBackend, kept: KeptPod, refused: bool
) -> None:
    kept.affinity, kept.refuses_changes = NEAR_OTHERS, refused
    async with asyncio.timeout(DEADLINE / 4):
        await backend.delete(NODE)
    assert kept.changes == [("PATCH", {LEAVING: "true"}), ("DELETE", None)]


async def test_a_pod_near_which_nothing_is_placed_takes_one_request(backend: KubernetesBackend, kept: KeptPod) -> None:
    async with asyncio.timeout(DEADLINE / 4):
        await backend.delete(NODE)
    assert kept.changes == [("DELETE", None)]
