"""Tests of how the operator orders the watch's events and the answers to its own requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest

from perdure.base.errors import ControlPlaneUnreachable
from perdure.base.kubernetes import Change, Changed, KubernetesApi, Listed
from perdure.client.client import Client
from perdure.operator import operator as operator_module
from perdure.operator.operator import Operator
from perdure.operator.reconcile import Looked, Reconciler
from perdure.operator.resource import TrainingJobResource
from tests.support.waiting import DEADLINE


def thing(generation: int, version: int, **metadata: Any) -> dict[str, Any]:
    known = {"name": "llama", "namespace": "nlp", "uid": "1"}
    return {"metadata": {**known, "generation": generation, "resourceVersion": str(version), **metadata}}


DELETED = thing(2, 11, deletionTimestamp="2026-01-01T00:00:00Z")


class Story:
    """In the place of the API server and of the reconciler: news arrives in the middle of a look."""

    def __init__(self, *, told: list[dict[str, Any]], answered: dict[str, Any]) -> None:
        self._told = told
        self._answered = answered
        self._looking = asyncio.Event()
        self._known = asyncio.Event()
        self.looked: asyncio.Queue[TrainingJobResource] = asyncio.Queue()

    async def follow(self, path: str, *, on_contact: Callable[[Exception | None], None]) -> AsyncGenerator[Change]:
        on_contact(None)
        yield Listed((thing(1, 10),))
        await self._looking.wait()
        for one in self._told:
            yield Changed(one)
        self._known.set()
        await asyncio.Event().wait()

    async def look(self, resource: TrainingJobResource) -> Looked:
        self.looked.put_nowait(resource)
        if resource.metadata.generation > 1:
            return Looked(resource=resource)
        self._looking.set()
        await self._known.wait()
        return Looked(resource=TrainingJobResource.model_validate(self._answered))


@pytest.mark.parametrize(
    ("told", "answered"),
    [
        pytest.param([DELETED], thing(1, 10), id="the-watch-knows-more"),
        pytest.param([], DELETED, id="the-answer-knows-more"),
        pytest.param([thing(1, 9)], DELETED, id="the-watch-is-behind"),
        pytest.param([DELETED], DELETED, id="both-know"),
    ],
)
async def test_a_change_during_a_look_is_looked_at_next(told: list[dict[str, Any]], answered: dict[str, Any]) -> None:
    story = Story(told=told, answered=answered)
    operator = Operator(cast(KubernetesApi, story), cast(Client, None))
    operator._reconciler = cast(Reconciler, story)
    running = asyncio.create_task(operator.run())
    try:
        async with asyncio.timeout(DEADLINE):
            assert not (await story.looked.get()).deleting
            assert (await story.looked.get()).deleting
        assert story.looked.empty()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_object_of_a_server_that_was_set_back_to_a_backup_is_known_as_it_is_listed() -> None:
    operator = Operator(cast(KubernetesApi, None), cast(Client, None))
    operator._take(Listed((thing(3, 100),)), "nlp")
    operator._take(Changed(thing(2, 50)), "nlp")
    assert operator._resources["1"].metadata.generation == 3, "a watch may be behind"
    operator._take(Listed((thing(2, 50),)), "nlp")
    operator._take(Changed(DELETED | {"metadata": DELETED["metadata"] | {"resourceVersion": "51"}}), "nlp")
    assert operator._resources["1"].deleting


class Unreadable:
    """In the place of the API server and of the reconciler: an object cannot be read once something is shown in it."""

    def __init__(self) -> None:
        self.looked = 0
        self.again = asyncio.Event()

    async def follow(self, path: str, *, on_contact: Callable[[Exception | None], None]) -> AsyncGenerator[Change]:
        on_contact(None)
        yield Listed((thing(1, 10),))
        await asyncio.Event().wait()

    async def look(self, resource: TrainingJobResource) -> Looked:
        self.looked += 1
        if self.looked > 1:
            self.again.set()
        raise ControlPlaneUnreachable("Temporal does not answer")

    async def doubt(self, resource: TrainingJobResource, error: Exception) -> Looked:
        return Looked(resource=TrainingJobResource.model_validate({**thing(1, 11), "spec": 1}))


async def test_an_object_that_cannot_be_read_any_more_ends_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_module, "FIRST_PAUSE", 0.01)
    site = Unreadable()
    operator = Operator(cast(KubernetesApi, site), cast(Client, None))
    operator._reconciler = cast(Reconciler, site)
    running = asyncio.create_task(operator.run())
    again = asyncio.create_task(site.again.wait())
    try:
        await asyncio.wait([running, again], timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
        assert site.again.is_set()
        assert not running.done()
    finally:
        for task in (running, again):
            task.cancel()
        await asyncio.gather(running, again, return_exceptions=True)
