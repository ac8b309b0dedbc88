"""Tests with a simulated API server that says in Events only why a pod does not start."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from perdure.activities.nodes.kubernetes import warnings
from perdure.activities.nodes.kubernetes.anchor import Anchors
from perdure.activities.nodes.kubernetes.naming import INCARNATION, RANK
from perdure.activities.nodes.kubernetes.watch import GroupWatch
from perdure.base.kubernetes import KubernetesApi
from perdure.contract import NodeEvent, NodeEventKind, WatchRequest
from tests.support.played_api import played_api, refusal
from tests.support.waiting import DEADLINE, eventually

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
NO_VOLUME = 'MountVolume.SetUp failed for volume "c" : configmap "c" not found'
REQUEST = WatchRequest(
    group_id="job/nlp/j/0123abcd/worker/0",
    job_id="job/nlp/j",
    job_first_run_id="r",
    uid="0123abcd",
    role="worker",
    group=0,
    backend="kubernetes",
    namespace="nlp",
    owner_check=timedelta(seconds=10),
)


class StartingPods:
    """Pods that have a machine, and Events about them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.events: list[dict[str, Any]] = []
        self.asked: list[str] = []
        """The field selector of each request for Events."""
        self.forbids = False
        self.states: asyncio.Queue[tuple[int, dict[str, Any]]] = asyncio.Queue()

    def pod(self, rank: int, state: dict[str, Any]) -> dict[str, Any]:
        labels = {RANK: str(rank), INCARNATION: "1"}
        return {
            "metadata": {"name": f"p{rank}", "uid": f"u{rank}", "labels": labels, "resourceVersion": "2"},
            "spec": {"nodeName": "gpu-1"},
            "status": {"phase": "Pending", "containerStatuses": [{"name": "training", "state": state}]},
        }

    def happens(self, reason: str, message: str, *, kind: str = "Warning", rank: int = 0) -> None:
        time = (BEGAN + timedelta(seconds=len(self.events))).isoformat()
        involved = {"kind": "Pod", "uid": f"u{rank}"}
        event = {"type": kind, "reason": reason, "message": message, "involvedObject": involved, "lastTimestamp": time}
        self.events.insert(0, event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/events"):
            fields = request.query["fieldSelector"]
            self.asked.append(fields)
            if self.forbids:
                return refusal(403, "Forbidden", 'User "worker" cannot list events')
            uid = fields.rpartition("uid=")[2]
            found = [event for event in self.events if event["involvedObject"]["uid"] == uid or "kind" in fields]
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": found})
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                rank, state = await self.states.get()
                event = {"type": "MODIFIED", "object": self.pod(rank, state)}
                await response.write(json.dumps(event).encode() + b"\n")
        waiting = {"waiting": {"reason": "ContainerCreating"}}
        pods = [self.pod(rank, waiting) for rank in range(self.count)]
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": pods})


@contextlib.asynccontextmanager
async def watched(pods: StartingPods) -> AsyncIterator[asyncio.Queue[NodeEvent]]:
    """Yields what a watch says after it has begun."""
    told: asyncio.Queue[NodeEvent] = asyncio.Queue()

    async def follow(api: KubernetesApi) -> None:
        async with contextlib.aclosing(GroupWatch(api, Anchors(api), REQUEST).batches()) as batches:
            async for batch in batches:
                for fact in batch:
                    assert isinstance(fact, NodeEvent)
                    told.put_nowait(fact)

    async with played_api(pods.answer) as api, asyncio.timeout(DEADLINE / 2):
        following = asyncio.create_task(follow(api))
        for _ in range(pods.count):
            await told.get()
        yield told
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "FIRST_READ", 0.05)
    monkeypatch.setattr(warnings, "LONGEST_PAUSE", 0.1)


async def asked_again(pods: StartingPods, times: int = 2) -> None:
    before = len(pods.asked)
    await eventually(lambda: len(pods.asked) >= before + times)


async def test_the_latest_warning_is_the_reason_until_the_pod_starts() -> None:
    pods = StartingPods(1)
    pods.happens("Scheduled", "assigned", kind="Normal")
    pods.happens("FailedMount", NO_VOLUME)
    async with watched(pods) as told:
        event = await told.get()
        assert (event.kind, event.reason) == (
            NodeEventKind.PENDING,
            f"a volume cannot be mounted (FailedMount: {NO_VOLUME})",
        )
        pods.happens("FailedMount", "timed out waiting for the condition")
        await asked_again(pods)
        assert told.empty(), "the same in other words"
        pods.happens("FailedCreatePodSandBox", "plugin type=bridge failed")
        assert (await told.get()).reason == (
            "its machine cannot prepare its network (FailedCreatePodSandBox: plugin type=bridge failed)"
        )
        pods.happens("Pulling", "Pulling image x", kind="Normal")
        assert (await told.get()).reason == ""
        pods.states.put_nowait((0, {"running": {}}))
        assert (await told.get()).kind is NodeEventKind.RUNNING
        asked = len(pods.asked)
        await asyncio.sleep(0.3)
        assert len(pods.asked) == asked, "nothing is read of a pod that runs"


async def test_a_change_of_the_pod_does_not_take_the_reason_away() -> None:
    pods = StartingPods(2)
    pods.happens("FailedMount", NO_VOLUME, rank=1)
    async with watched(pods) as told:
        assert "FailedMount" in (await told.get()).reason
        pods.states.put_nowait((1, {"waiting": {"reason": "PodInitializing"}}))
        pods.states.put_nowait((0, {"running": {}}))
        event = await told.get()
        assert (event.rank, event.kind) == (0, NodeEventKind.RUNNING)


async def test_many_pods_cost_one_request() -> None:
    pods = StartingPods(100)
    pods.happens("FailedMount", NO_VOLUME, rank=99)
    async with watched(pods) as told:
        event = await told.get()
        assert (event.rank, "FailedMount" in event.reason) == (99, True)
    assert set(pods.asked) == {"involvedObject.kind=Pod"}


async def test_one_refusal_does_not_hide_warnings_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API server that starts refuses everything for a moment."""
    monkeypatch.setattr(warnings, "REFUSED_AGAIN", 0.0)
    pods = StartingPods(1)
    pods.forbids = True
    async with watched(pods) as told:
        await asked_again(pods, 1)
        pods.forbids = False
        pods.happens("FailedMount", NO_VOLUME)
        assert NO_VOLUME in (await told.get()).reason


async def test_without_the_right_nothing_is_asked_again() -> None:
    pods = StartingPods(1)
    pods.forbids = True
    async with watched(pods) as told:
        await asked_again(pods, 1)
        await asyncio.sleep(0.3)
        assert len(pods.asked) == 1
        pods.states.put_nowait((0, {"running": {}}))
        assert (await told.get()).kind is NodeEventKind.RUNNING
