"""Tests with a simulated API server whose machines never end their pods: what waits for that, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from perdure.activities.nodes.kubernetes import deletion
from perdure.base.kubernetes import KubernetesApi
from tests.kubernetes.test_pod_finalizers import LABELS, NODE
from tests.support.played_api import played_api
from tests.support.waiting import DEADLINE, eventually

PULLS = {"waiting": {"reason": "PodInitializing"}}
RUNS = {"running": {}}
HAS_ENDED = {"terminated": {"exitCode": 0}}


class SilentMachine:
    """A machine that was lost without notice: what its pod's object says does not change any more."""

    def __init__(self, state: dict[str, Any], due: timedelta) -> None:
        self.state = state
        self.due: datetime | None = None
        """Counts from the first list."""
        self._due = due
        self.lists = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch"):
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.Event().wait()
            return response
        self.lists += 1
        self.due = self.due or datetime.now(UTC) + self._due
        pod = {
            "metadata": {"name": NODE.name, "uid": "u", "labels": LABELS, "deletionTimestamp": self.due.isoformat()},
            "spec": {"nodeName": "gpu-1"},
            "status": {"phase": "Running", "containerStatuses": [{"name": "training", "state": self.state}]},
        }
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [pod]})


@contextlib.asynccontextmanager
async def machine(state: dict[str, Any], *, due: timedelta) -> AsyncIterator[tuple[SilentMachine, KubernetesApi]]:
    silent = SilentMachine(state, due)
    async with played_api(silent.answer) as api:
        yield silent, api


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "OVERDUE", timedelta(seconds=0.2))


@pytest.mark.parametrize("state", [PULLS, HAS_ENDED], ids=["pulls", "has ended"])
@pytest.mark.parametrize("winding_down", [False, True])
async def test_nothing_waits_longer_than_the_bound_for_a_pod_that_trains_no_more_or_not_yet(
    state: dict[str, Any], winding_down: bool
) -> None:
    node = NODE.model_copy(update={"winding_down": winding_down})
    async with machine(state, due=timedelta(seconds=0.3)) as (silent, api):
        async with asyncio.timeout(DEADLINE / 4):
            left = await deletion.until_gone(api, [node])
        assert silent.lists > 1, "it has waited"
    assert left[NODE.name].startswith(f"pod {NODE.name} is left to the cluster: its machine gpu-1 has not ended it")


async def test_the_end_of_a_job_waits_no_longer_for_a_pod_that_trains() -> None:
    async with machine(RUNS, due=timedelta(seconds=-1)) as (_, api), asyncio.timeout(DEADLINE / 4):
        await deletion.until_gone(api, [NODE])


async def test_a_replacement_waits_for_a_pod_that_may_train() -> None:
    node = NODE.model_copy(update={"winding_down": False})
    async with machine(RUNS, due=timedelta(seconds=-1)) as (silent, api):
        waiting = asyncio.create_task(deletion.until_gone(api, [node]))
        await eventually(lambda: silent.lists >= 4)
        assert not waiting.done()
        silent.state = HAS_ENDED
        async with asyncio.timeout(DEADLINE / 4):
            await waiting


async def test_a_grace_period_is_waited_for() -> None:
    async with machine(PULLS, due=timedelta(hours=1)) as (silent, api):
        waiting = asyncio.create_task(deletion.until_gone(api, [NODE]))
        await eventually(lambda: silent.lists >= 4)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
