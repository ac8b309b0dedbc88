"""Tests of a pod that an API server has created otherwise than it was requested; the server is played."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from perdure.activities.nodes.backend import NodeNotYet
from perdure.activities.nodes.kubernetes.admission import keep_findable
from tests.support.played_api import played_api

OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "job", "uid": "anchor"}
LABELS = {
    "app.kubernetes.io/managed-by": "perdure",
    "perdure.dev/uid": "0a1b2c3d",
    "perdure.dev/rank": "1",
    "team": "a",
}
REQUESTED: dict[str, Any] = {"metadata": {"name": "p", "labels": LABELS, "ownerReferences": [OWNER]}}


def made(labels: dict[str, str], owners: list[dict[str, str]]) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "nlp", "uid": "u", "labels": labels, "ownerReferences": owners}}


async def deletions(pod: dict[str, Any], expected: str = "") -> list[tuple[str, Any]]:
    """Returns the path and uid of each deletion, where the pod is refused with these words."""
    found: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        content = json.loads(await request.text())
        found.append((request.path, content["preconditions"]["uid"]))
        return web.json_response({})

    async with played_api(answer) as api:
        if not expected:
            await keep_findable(api, REQUESTED, pod)
        else:
            with pytest.raises(NodeNotYet, match=expected) as refused:
                await keep_findable(api, REQUESTED, pod)
            assert not refused.value.queued
    return found


async def test_what_others_add_and_users_labels_that_they_change_are_theirs() -> None:
    labels = LABELS | {"team": "b", "security.istio.io/tlsMode": "istio"}
    assert await deletions(made(labels, [OWNER, {**OWNER, "uid": "another"}])) == []


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (made(LABELS | {"perdure.dev/uid": "theirs"}, [OWNER]), "changes the label perdure.dev/uid of its pod"),
        (made({}, [OWNER]), "the label app.kubernetes.io/managed-by, the label perdure.dev/rank, the label perdure"),
        (made(LABELS, []), "changes the owner of its pod"),
    ],
)
async def test_a_pod_that_its_job_could_not_find_is_deleted(pod: dict[str, Any], words: str) -> None:
    assert await deletions(pod, words) == [("/api/v1/namespaces/nlp/pods/p", "u")]
