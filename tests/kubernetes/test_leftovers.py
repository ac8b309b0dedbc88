"""Tests that the search for leftovers of closed jobs survives a namespace that forbids it or holds forged objects."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import web
from kubernetes.aio.utils import Backoff
from temporalio.client import Client

from perdure.activities.nodes.kubernetes.leftovers import keep_tidy
from perdure.base import kubernetes as api_module
from perdure.contract.names import TRAINING_JOB, job_workflow_id
from tests.support.played_api import played_api, refusal


def anchor(name: str, workflow: str, run: str) -> dict[str, Any]:
    annotations = {"perdure.dev/workflow": workflow, "perdure.dev/run": run}
    labels = {"perdure.dev/uid": run[-8:]}
    metadata = {"name": name, "uid": name, "labels": labels, "annotations": annotations}
    return {"metadata": metadata | {"creationTimestamp": "2026-01-01T00:00:00Z"}}


class PlayedAnchors:
    """ConfigMaps of namespaces, one of which may not be changed."""

    def __init__(self, *, forbidden: str) -> None:
        self.anchors: dict[str, list[dict[str, Any]]] = {}
        self.deleted: asyncio.Queue[str] = asyncio.Queue()
        self._forbidden = forbidden

    async def answer(self, request: web.Request) -> web.StreamResponse:
        namespace = request.path.split("/")[4]
        if request.method == "GET":
            items = [
                one | {"metadata": one["metadata"] | {"namespace": namespace}}
                for one in self.anchors.get(namespace, [])
            ]
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        if namespace == self._forbidden:
            return refusal(403, "Forbidden", "configmaps is forbidden")
        self.deleted.put_nowait(request.path.split("/")[-1])
        return web.json_response({})


async def test_one_namespace_that_forbids_or_forges_leaves_the_others_tidied(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=2, duration=0.01, factor=1.0))
    namespaces = [f"{name}-{uuid4().hex[:8]}" for name in ("forbids", "forges", "c", "d", "e")]
    played = PlayedAnchors(forbidden=namespaces[0])
    expected: set[str] = set()
    for namespace in namespaces:
        workflow = job_workflow_id(namespace, "closed")
        handle = await temporal_client.start_workflow(TRAINING_JOB, id=workflow, task_queue=namespace)
        await handle.terminate()
        run = handle.first_execution_run_id or ""
        played.anchors[namespace] = [anchor(f"left-{namespace}", workflow, run)]
        if namespace != namespaces[0]:
            expected.add(f"left-{namespace}")
    played.anchors[namespaces[1]].insert(0, anchor("forged", "x" * 5000, "y"))
    async with played_api(played.answer) as api:
        tidying = asyncio.create_task(keep_tidy(api, temporal_client, interval=timedelta(milliseconds=100)))
        try:
            async with asyncio.timeout(60):
                found: set[str] = set()
                while found != expected:
                    found.add(await played.deleted.get())
                    assert found <= expected
        finally:
            tidying.cancel()
            await asyncio.gather(tidying, return_exceptions=True)
