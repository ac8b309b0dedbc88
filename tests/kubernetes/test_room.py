"""Tests of the places for pods in a namespace whose nodes the site limits, with a played API server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from perdure.activities.nodes.backend import NodeNotYet
from perdure.activities.nodes.kubernetes import room as room_module
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.room import LEDGER, Room
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from tests.support.played_api import played_api, refusal

PODS = "/api/v1/namespaces/nlp/pods"
CONFIG_MAPS = "/api/v1/namespaces/nlp/configmaps"


class PlayedNamespace:
    """A namespace with pods, and a ledger that is changed by compare-and-set."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.ledger: dict[str, Any] | None = None
        self.requests: Counter[str] = Counter()

    @property
    def places(self) -> dict[str, Any]:
        data: dict[str, str] = (self.ledger or {}).get("data") or {}
        return {name: json.loads(text) for name, text in data.items()}

    def _written(self, content: dict[str, Any]) -> web.Response:
        version = int(content["metadata"].get("resourceVersion", "0")) + 1
        self.ledger = merge(content, {"metadata": {"resourceVersion": str(version)}})
        return web.json_response(self.ledger)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests[f"{request.method} {request.path.rpartition('/')[2]}"] += 1
        match request.method, request.path:
            case "GET", path if path == PODS:
                return web.json_response({"metadata": {"resourceVersion": "1"}, "items": list(self.pods.values())})
            case "POST", path if path == PODS:
                pod = await request.json()
                if pod["metadata"]["name"] in self.pods:
                    return refusal(409, "AlreadyExists", "it exists")
                self.pods[pod["metadata"]["name"]] = pod
                return web.json_response(pod)
            case "GET", path if path == f"{CONFIG_MAPS}/{LEDGER}":
                return web.json_response(self.ledger) if self.ledger else refusal(404, "NotFound", "none")
            case "POST", path if path == CONFIG_MAPS:
                return (
                    refusal(409, "AlreadyExists", "it exists") if self.ledger else self._written(await request.json())
                )
            case "PATCH", path if path == f"{CONFIG_MAPS}/{LEDGER}":
                content = await request.json()
                assert self.ledger is not None
                if content["metadata"]["resourceVersion"] != self.ledger["metadata"]["resourceVersion"]:
                    return refusal(409, "Conflict", "it has changed")
                return self._written(merge(self.ledger, content))
            case other:
                raise AssertionError(other)


def pod(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "nlp"}, "spec": {"containers": [{"name": "training"}]}}


@pytest.fixture
async def played() -> PlayedNamespace:
    return PlayedNamespace()


@pytest.fixture
async def api(played: PlayedNamespace) -> AsyncIterator[KubernetesApi]:
    async with played_api(played.answer) as made:
        yield made


async def create(room: Room, api: KubernetesApi, name: str) -> bool:
    """Returns whether there was room for the pod."""
    try:
        async with room.place_for("nlp", pod(name)):
            await api.create(PODS, pod(name))
    except NodeNotYet:
        return False
    return True


async def test_workers_that_create_many_pods_list_them_seldom_and_never_exceed_the_limit(
    played: PlayedNamespace, api: KubernetesApi
) -> None:
    rooms = [Room(api, SitePolicy(max_nodes=60)) for _ in range(2)]
    made = await asyncio.gather(*(create(rooms[number % 2], api, f"pod-{number}") for number in range(70)))
    assert sum(made) == len(played.pods) == 60
    # One list of each worker to begin with, and one for each pod that is refused.
    assert played.requests["GET pods"] <= 2 + 10


async def test_a_pod_that_is_gone_leaves_its_place_to_the_next(played: PlayedNamespace, api: KubernetesApi) -> None:
    room = Room(api, SitePolicy(max_nodes=2))
    assert [await create(room, api, name) for name in ("a", "b", "c")] == [True, True, False]
    del played.pods["b"]
    assert await create(room, api, "c")


async def test_the_pods_of_another_worker_count_since_they_have_a_place(
    played: PlayedNamespace, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Room(api, SitePolicy(max_nodes=2)) for _ in range(2))
    assert await create(second, api, "a")
    assert await create(first, api, "b")
    listed = played.requests["GET pods"]
    assert not await create(second, api, "c")
    assert played.requests["GET pods"] == listed + 1, "none is refused without a new list"
    del played.pods["b"]
    # Their clocks may differ, so what the other has created lately may be missing in the list.
    assert not await create(second, api, "c")
    monkeypatch.setattr(room_module, "_CLOCKS_DIFFER", -1.0)
    assert await create(second, api, "c")


async def test_the_pod_of_a_worker_that_has_died_since_keeps_its_place(
    played: PlayedNamespace, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Room(api, SitePolicy(max_nodes=1)) for _ in range(2))
    with pytest.raises(asyncio.CancelledError):
        async with first.place_for("nlp", pod("a")):
            raise asyncio.CancelledError
    assert not await create(second, api, "b")
    monkeypatch.setattr(room_module, "_CREATED_WITHIN", 0.0)
    assert await create(second, api, "b")
    assert set(played.places) == {"b"}


async def test_a_pod_that_cannot_be_created_leaves_its_place_and_one_that_exists_keeps_it(
    played: PlayedNamespace, api: KubernetesApi
) -> None:
    room, other = (Room(api, SitePolicy(max_nodes=1)) for _ in range(2))
    with pytest.raises(KubernetesError, match="wrong"):
        async with room.place_for("nlp", pod("a")):
            raise KubernetesError(422, "Invalid", "wrong")
    assert played.places == {}
    assert await create(room, api, "b")
    with pytest.raises(KubernetesError, match="it exists"):
        await create(room, api, "b")
    assert "made" in played.places["b"]
    assert not await create(other, api, "c")


async def test_places_go_once_every_list_has_their_pods(
    played: PlayedNamespace, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(api, SitePolicy(max_nodes=3))
    assert await create(room, api, "a")
    monkeypatch.setattr(room_module, "_KEPT", 0.0)
    monkeypatch.setattr(room_module, "_LIST_LASTS", 0.0)
    assert await create(room, api, "b")
    assert await create(room, api, "c")
    assert not await create(room, api, "d")
    assert "a" not in played.places


@pytest.mark.parametrize("text", ["", "mine", "{}", '{"gpus": "many", "at": 1}', "[1]", '{"gpus": -9, "at": 1e12}'])
async def test_what_users_write_into_the_ledger_keeps_no_pod_from_being_created(
    played: PlayedNamespace, api: KubernetesApi, text: str
) -> None:
    assert await create(Room(api, SitePolicy(max_nodes=2)), api, "a")
    assert played.ledger is not None
    played.ledger["data"]["mine"] = text
    assert [await create(Room(api, SitePolicy(max_nodes=2)), api, name) for name in ("b", "c")] == [True, False]
    assert set(played.places) == {"a", "b"}
