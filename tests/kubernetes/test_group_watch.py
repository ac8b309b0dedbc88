"""Tests of a group's watch, with a played API server: what happens to many pods at once is told at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from perdure.activities.nodes.backend import Revocation
from perdure.activities.nodes.kubernetes.anchor import Anchors
from perdure.activities.nodes.kubernetes.naming import INCARNATION, RANK
from perdure.activities.nodes.kubernetes.watch import GroupWatch
from perdure.contract import NodeEvent, NodeEventKind
from tests.kubernetes.test_pod_warnings import REQUEST
from tests.support.played_api import played_api, refusal
from tests.support.waiting import DEADLINE

PODS = 64


def pod(rank: int) -> dict[str, Any]:
    return {
        "metadata": {
            "name": f"p{rank}",
            "uid": f"u{rank}",
            "labels": {RANK: str(rank), INCARNATION: "1"},
            "resourceVersion": "2",
            "ownerReferences": [{"name": "perdure-j-0123abcd", "uid": "anchor"}],
        },
        "spec": {"nodeName": "gpu-1"},
        "status": {"phase": "Running", "containerStatuses": [{"name": "training", "state": {"running": {}}}]},
    }


class PlayedPods:
    """Pods of a job that runs, all of which are removed at once."""

    def __init__(self) -> None:
        self.removed = asyncio.Event()
        self.desired = True
        self.requests: Counter[str] = Counter()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "configmaps" in request.path:
            self.requests[request.method] += 1
            if self.desired:
                return web.json_response({"metadata": {"name": "perdure-j-0123abcd", "uid": "anchor"}})
            return refusal(404, "NotFound", "none") if request.method == "GET" else web.json_response({"metadata": {}})
        if not request.query.get("watch"):
            items = [pod(rank) for rank in range(PODS)]
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        response = web.StreamResponse()
        await response.prepare(request)
        await self.removed.wait()
        lines = [json.dumps({"type": "DELETED", "object": pod(rank)}) for rank in range(PODS)]
        await response.write("".join(f"{line}\n" for line in lines).encode())
        await asyncio.Event().wait()
        return response


@contextlib.asynccontextmanager
async def watched(played: PlayedPods) -> AsyncIterator[AsyncIterator[tuple[NodeEvent | Revocation, ...]]]:
    async with (
        played_api(played.answer) as api,
        asyncio.timeout(DEADLINE),
        contextlib.aclosing(GroupWatch(api, Anchors(api), REQUEST).batches()) as batches,
    ):
        assert len(await anext(batches)) == PODS
        played.removed.set()
        yield batches


@pytest.mark.parametrize("desired", [True, False])
async def test_pods_that_are_removed_at_once_are_reported_after_one_question(desired: bool) -> None:
    played = PlayedPods()
    played.desired = desired
    async with watched(played) as batches:
        found: list[NodeEvent | Revocation] = []
        while len(found) < PODS + (not desired):
            found += await anext(batches)
        if not desired:
            assert isinstance(found.pop(0), Revocation)
        assert [(one.rank, one.kind) for one in found if isinstance(one, NodeEvent)] == [
            (rank, NodeEventKind.GONE) for rank in range(PODS)
        ]
        # The answer may come in a few pieces.
        assert played.requests["GET"] <= 8, played.requests
