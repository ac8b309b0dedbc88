"""Tests of the resource's definition and its removal; tests/kubernetes verifies that an API server accepts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.utils import Backoff

from perdure.base import kubernetes as api_module
from perdure.base.kubernetes_errors import KubernetesError
from perdure.operator.crd import custom_resource_definition
from perdure.operator.definition import PATH, Definition
from perdure.operator.resource import TrainingJobResource
from tests.support.played_api import played_api, refusal


def mappings(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "properties" in schema:
        yield schema
    for inner in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from mappings(inner)


def test_no_field_of_a_user_is_pruned_and_none_is_filled_in():
    (version,) = custom_resource_definition()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert all(one["x-kubernetes-preserve-unknown-fields"] for one in mappings(spec))
    assert all("default" not in field for one in mappings(spec) for field in one["properties"].values())
    assert spec["properties"]["retry"]["properties"]["max_restarts"]["description"].endswith("Default: 10.")


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}Z"


def removed(second: int | None) -> web.Response:
    return web.json_response({"metadata": {"deletionTimestamp": at(second)} if second is not None else {}})


@pytest.mark.parametrize(
    ("answer", "deleted_at", "expected"),
    [
        pytest.param(lambda: removed(None), 20, False, id="by-a-user"),
        pytest.param(lambda: removed(30), 20, False, id="by-a-user-before-the-removal"),
        pytest.param(lambda: removed(20), 20, True, id="in-the-second-of-the-removal"),
        pytest.param(lambda: removed(20), 25, True, id="by-the-removal"),
        pytest.param(lambda: refusal(404, "NotFound", "not found"), 20, True, id="after-the-removal"),
        pytest.param(lambda: removed(10), None, False, id="not-deleted"),
        pytest.param(lambda: refusal(403, "Forbidden", "no"), 20, False, id="definition-may-not-be-read"),
    ],
)
async def test_the_removal_of_the_definition_is_told_from_a_user_s_deletion(
    answer: Any, deleted_at: int | None, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=2, duration=0.01, factor=1.0))

    async def answered(request: web.Request) -> web.StreamResponse:
        assert request.path == PATH
        return answer()

    assert await deletes(answered, deleted_at) is expected


async def test_no_job_ends_while_the_definition_cannot_be_read_for_now(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=2, duration=0.01, factor=1.0))

    async def overloaded(request: web.Request) -> web.StreamResponse:
        return refusal(503, "ServiceUnavailable", "later")

    with pytest.raises(KubernetesError, match="later"):
        await deletes(overloaded, 20)


async def deletes(answer: Any, deleted_at: int | None) -> bool:
    metadata = {"name": "a", "namespace": "nlp", "uid": "1"}
    if deleted_at is not None:
        metadata["deletionTimestamp"] = at(deleted_at)
    async with played_api(answer) as api:
        return await Definition(api).deletes(TrainingJobResource.model_validate({"metadata": metadata}))
