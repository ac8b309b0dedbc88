"""Tests of what a worker remembers of jobs' anchors; the API server is played."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from perdure.activities.nodes.kubernetes import anchor as anchor_module
from perdure.activities.nodes.kubernetes.anchor import Anchors
from tests.kubernetes.pods import PodJob
from tests.support.played_api import played_api


async def test_a_worker_that_sees_many_jobs_remembers_the_newest_anchors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor_module, "_REMEMBERED", -1.0)

    async def create(request: web.Request) -> web.StreamResponse:
        made = json.loads(await request.text())
        made["metadata"]["uid"] = made["metadata"]["name"]
        return web.json_response(made)

    async with played_api(create) as api:
        anchors = Anchors(api)
        for _ in range(20):
            await anchors.owner_reference(PodJob(api, "nlp").request(0))
        assert len(anchors._owners) == 1
