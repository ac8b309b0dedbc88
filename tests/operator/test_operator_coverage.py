"""Tests that the operator survives the loss of a namespace, of rights or of the definition, and reports it."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from urllib.error import HTTPError

import pytest
from aiohttp import web
from kubernetes.aio.utils import Backoff

from perdure.base import kubernetes as api_module
from perdure.base.nested_json import read_json
from perdure.base.services import Readiness, health_endpoint
from perdure.client.client import Client
from perdure.operator import coverage as coverage_module
from perdure.operator import operator as operator_module
from perdure.operator.coverage import STALE, Cause, Coverage
from perdure.operator.operator import Operator
from perdure.operator.reconcile import Looked, Reconciler
from perdure.operator.resource import TrainingJobResource, collection
from perdure.spec.errors import SpecError
from tests.support.played_api import played_api, refusal
from tests.support.temporal_server import free_port
from tests.support.waiting import DEADLINE, eventually

FORBIDDEN = (403, "Forbidden", 'trainingjobs.perdure.dev is forbidden: cannot list resource "trainingjobs"')
NOT_DEFINED = (404, "NotFound", "the server could not find the requested resource")


def thing(name: str, namespace: str, **fields: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "10"}
    return {"metadata": metadata, **fields}


class PlayedCluster:
    """Lists and watches of TrainingJobs; a namespace that is lost refuses both, and ends the watches that are open."""

    def __init__(self, **objects: list[dict[str, Any]]) -> None:
        self.objects = objects
        self.lost: dict[str, tuple[int, str, str] | str] = {}
        self._events: defaultdict[str, asyncio.Queue[dict[str, Any] | None]] = defaultdict(asyncio.Queue)

    def tell(self, namespace: str, created: dict[str, Any]) -> None:
        self._events[collection(namespace)].put_nowait({"type": "ADDED", "object": created})

    def lose(self, namespace: str, how: tuple[int, str, str] | str) -> None:
        self.lost[namespace] = how
        for path, events in self._events.items():
            if f"/{namespace}/" in path:
                events.put_nowait(None)

    def restore(self, namespace: str) -> None:
        del self.lost[namespace]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        namespace = request.path.split("/")[5]
        match self.lost.get(namespace):
            case (status, reason, message):
                return refusal(status, reason, message)
            case str() as text:
                return web.Response(text=text)
            case None:
                pass
        if not request.query.get("watch"):
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": self.objects[namespace]})
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self._events[request.path].get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


class Looks:
    """In the place of the reconciler: records the objects that are reconciled."""

    def __init__(self) -> None:
        self.names: asyncio.Queue[str] = asyncio.Queue()

    async def look(self, resource: TrainingJobResource) -> Looked:
        self.names.put_nowait(resource.metadata.name)
        return Looked(resource=resource)


@asynccontextmanager
async def operating(cluster: PlayedCluster, looks: Looks) -> AsyncIterator[Operator]:
    async with played_api(cluster.answer) as api:
        operator = Operator(api, cast(Client, None), namespaces=tuple(cluster.objects))
        operator._reconciler = cast(Reconciler, looks)
        running = asyncio.create_task(operator.run())
        try:
            yield operator
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions with shorter pauses."""
    monkeypatch.setattr(api_module, "_RETRIES", Backoff(steps=2, duration=0.01, factor=1.0))
    monkeypatch.setattr(api_module, "_REFUSAL_IS_FINAL", 0.05)
    monkeypatch.setattr(api_module, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(operator_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(operator_module, "LONGEST_PAUSE", 0.1)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        pytest.param(FORBIDDEN, Cause.FORBIDDEN, id="forbidden"),
        pytest.param(NOT_DEFINED, Cause.NOT_DEFINED, id="not-defined"),
        pytest.param("<html>not an API server</html>\n", Cause.FAILED, id="answer-of-a-proxy"),
    ],
)
@pytest.mark.parametrize("at_the_start", [True, False], ids=["before-the-start", "while-it-runs"])
async def test_a_lost_namespace_is_reported_and_the_others_are_served(
    how: tuple[int, str, str] | str, cause: Cause, at_the_start: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="perdure.operator")
    cluster, looks = PlayedCluster(nlp=[thing("a", "nlp")], vision=[thing("b", "vision")]), Looks()
    if at_the_start:
        cluster.lose("vision", how)
    async with asyncio.timeout(DEADLINE), operating(cluster, looks) as operator:
        coverage = operator.coverage
        assert not coverage.ready
        if not at_the_start:
            assert {await looks.names.get(), await looks.names.get()} == {"a", "b"}
            cluster.lose("vision", how)
        await eventually(lambda: [gap.cause for gap in coverage.gaps] == [cause])
        assert (coverage.ready, coverage.serves("nlp"), coverage.serves("vision")) == (True, True, False)
        if at_the_start:
            assert await looks.names.get() == "a"
        cluster.tell("nlp", thing("c", "nlp"))
        assert await looks.names.get() == "c"
        assert f"not serving vision: {cause} since" in coverage.report()
        metrics = (await operator.metrics.text()).decode()
        assert 'perdure_operator_namespace_served{job_namespace="nlp"} 1.0' in metrics
        assert 'perdure_operator_namespace_served{job_namespace="vision"} 0.0' in metrics
        assert "perdure_operator_objects 2.0" in metrics

        cluster.restore("vision")
        assert await looks.names.get() == "b"
        assert coverage.gaps == ()
    warnings = [one.getMessage() for one in caplog.records if one.getMessage().startswith("not serving")]
    assert len(warnings) == 1, warnings


async def test_without_a_namespace_it_waits_and_is_not_ready() -> None:
    cluster, looks = PlayedCluster(nlp=[thing("a", "nlp")], vision=[]), Looks()
    for namespace in cluster.objects:
        cluster.lose(namespace, NOT_DEFINED)
    async with asyncio.timeout(DEADLINE), operating(cluster, looks) as operator:
        coverage = operator.coverage
        await eventually(lambda: {gap.cause for gap in coverage.gaps} == {Cause.NOT_DEFINED})
        assert not coverage.ready
        assert "Apply deploy/crds/trainingjobs.yaml" in coverage.report()
        for namespace in cluster.objects:
            cluster.restore(namespace)
        assert await looks.names.get() == "a"
        await eventually(lambda: coverage.ready and not coverage.gaps)


@pytest.mark.parametrize("answers", [True, False], ids=["errors", "silence"])
def test_a_namespace_is_stale_once_the_api_server_has_told_nothing_for_minutes(
    answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    coverage = Coverage(("nlp",), clock=lambda: now)
    coverage.gain("nlp")
    for _ in range(3):
        now += STALE / 4
        if answers:
            coverage.miss("nlp", ConnectionError("certificate verify failed"))
        assert coverage.ready
    now += STALE / 4
    for _ in range(2):
        if answers:
            coverage.miss("nlp", ConnectionError("certificate verify failed"))
    reason = "certificate verify failed" if answers else "the API server tells nothing"
    assert not coverage.ready
    assert not coverage.serves("nlp")
    assert coverage.report() == f"serving nothing\nnot serving nlp: silent since 2026-01-01T00:00:00Z: {reason}.\n"
    assert len(caplog.records) == int(answers)
    coverage.gain("nlp")
    assert coverage.ready
    assert coverage.report() == "serving nlp\n"


def test_a_namespace_that_was_never_read_names_what_keeps_the_api_server_from_answering() -> None:
    coverage = Coverage(("nlp",))
    coverage.miss("nlp", ConnectionError("connection refused"))
    assert "not serving nlp: not_read since" in coverage.report()
    assert "connection refused" in coverage.report()


async def test_an_api_server_that_is_away_for_minutes_is_told_and_what_it_has_missed_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coverage_module, "STALE", timedelta(milliseconds=200))
    cluster, looks = PlayedCluster(nlp=[thing("a", "nlp")]), Looks()
    async with asyncio.timeout(DEADLINE), operating(cluster, looks) as operator:
        assert await looks.names.get() == "a"
        cluster.lose("nlp", (503, "ServiceUnavailable", "etcd is away"))
        await eventually(lambda: [gap.cause for gap in operator.coverage.gaps] == [Cause.SILENT])
        assert "etcd is away" in operator.coverage.report()
        assert 'namespace_served{job_namespace="nlp"} 0.0' in (await operator.metrics.text()).decode()
        assert "perdure_operator_objects 1.0" in (await operator.metrics.text()).decode(), "it is not forgotten"
        monkeypatch.setattr(coverage_module, "STALE", STALE)
        cluster.restore("nlp")
        cluster.tell("nlp", thing("b", "nlp"))
        assert await looks.names.get() == "b"
        assert operator.coverage.ready


async def test_an_object_that_cannot_be_read_leaves_the_others_served(caplog: pytest.LogCaptureFixture) -> None:
    strange = thing("strange", "nlp", status={"worldSize": "many"})
    cluster, looks = PlayedCluster(nlp=[strange, thing("a", "nlp")]), Looks()
    async with asyncio.timeout(DEADLINE), operating(cluster, looks) as operator:
        assert await looks.names.get() == "a"
        assert operator.coverage.ready
    assert "nlp/strange cannot be read" in caplog.text


async def test_probes_show_the_report_and_only_readiness_fails() -> None:
    states = [Readiness(False, "serving nothing\n"), Readiness(True, "serving nlp\n")]

    port = free_port()

    def probe(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    async with health_endpoint(port, lambda: states.pop(0)):
        assert await asyncio.to_thread(probe, "/healthz") == (200, "ok\n")
        assert await asyncio.to_thread(probe, "/readyz") == (503, "serving nothing\n")
        assert await asyncio.to_thread(probe, "/readyz") == (200, "serving nlp\n")


DEEP = json.loads('{"a": ' * 300 + "1" + "}" * 300)


async def test_an_object_whose_specification_is_nested_without_measure_keeps_no_other_from_being_served() -> None:
    cluster = PlayedCluster(nlp=[thing("deep", "nlp", spec=DEEP), thing("llama", "nlp")])
    looks = Looks()
    async with asyncio.timeout(DEADLINE), operating(cluster, looks) as operator:
        assert {await looks.names.get(), await looks.names.get()} == {"deep", "llama"}
        cluster.tell("nlp", thing("deeper", "nlp", spec=DEEP))
        cluster.tell("nlp", thing("bert", "nlp"))
        assert {await looks.names.get(), await looks.names.get()} == {"deeper", "bert"}
        assert operator.coverage.serves("nlp")


def test_an_object_whose_specification_is_nested_too_deep_is_refused() -> None:
    (known,) = read_json(json.dumps([thing("deep", "nlp", spec=DEEP)]).encode())
    with pytest.raises(SpecError, match="nested more than"):
        TrainingJobResource.model_validate(known).job()
