"""Tests of the operator with a played API server: an object says within seconds what its job waits for, where Temporal
or a worker does not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from temporalio.client import Client as TemporalClient

from perdure.activities.nodes.kubernetes.merge import merge
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.operator.operator import Operator
from perdure.operator.ownership import Ownership
from perdure.operator.resource import FINALIZER, TrainingJobResource
from perdure.operator.serve import TemporalLink
from tests.support.played_api import played_api, refusal
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually

WITHIN = 20.0
"""Seconds: a call to a server that does not answer takes 5, and as many for the question who it is."""


class PlayedObject:
    """An API server that holds one TrainingJob, and the Events about it."""

    def __init__(self, name: str) -> None:
        metadata = {"name": name, "namespace": "nlp", "uid": "1", "generation": 1, "resourceVersion": "10"}
        command = ["sleep", "600"]
        self.content: dict[str, Any] = {
            "metadata": metadata,
            "spec": {"backend": "joined", "roles": {"worker": {"nodes": 1, "command": command}}},
        }
        self.events: list[str] = []
        self.news = asyncio.Event()
        """Set once the watch is to tell what the object is now."""
        self.forbids: set[str] = set()
        """Methods that the operator has no right to, and `WATCH`."""

    @property
    def resource(self) -> TrainingJobResource:
        return TrainingJobResource.model_validate(self.content)

    def condition(self, kind: str) -> tuple[str, str]:
        found = self.resource.status.condition(kind)
        return (found.status.value, found.reason) if found else ("", "")

    def _grow(self) -> None:
        version = int(self.content["metadata"]["resourceVersion"]) + 1
        self.content["metadata"]["resourceVersion"] = str(version)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method in self.forbids:
            return refusal(403, "Forbidden", 'User "operator" cannot do that')
        match request.method:
            case "PATCH":
                self.content = merge(self.content, await request.json())
                self._grow()
                return web.json_response(self.content)
            case "POST":
                event = await request.json()
                self.events.append(f"{event['type']} {event['reason']}")
                return web.json_response(event)
            case _ if request.query.get("watch"):
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await self.news.wait()
                    self.news.clear()
                    if "WATCH" in self.forbids:
                        return response
                    self._grow()
                    event = {"type": "MODIFIED", "object": self.content}
                    await response.write(json.dumps(event).encode() + b"\n")
            case _:
                return web.json_response({"metadata": {"resourceVersion": "10"}, "items": [self.content]})


@asynccontextmanager
async def operating(played: PlayedObject, client: Client) -> AsyncIterator[Operator]:
    async with played_api(played.answer) as api:
        operator = Operator(api, client, namespaces=("nlp",), ownership=Ownership.IGNORE)
        tasks = [asyncio.create_task(operator.run())]
        if isinstance(client, TemporalLink):
            tasks.append(asyncio.create_task(client.keep_connecting()))
        try:
            yield operator
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_job_that_no_worker_decides_says_so_in_a_condition_and_an_event(
    temporal_client: TemporalClient,
) -> None:
    played = PlayedObject("silent")
    async with operating(played, Client(temporal=temporal_client)) as operator:
        await eventually(lambda: played.resource.status.phase == "STARTING", within=WITHIN)
        assert played.condition("Accepted") == ("True", "Valid")
        await eventually(lambda: "Warning NoWorker" in played.events, within=WITHIN)
        assert played.condition("Running") == ("Unknown", "NoWorker")
        running = played.resource.status.condition("Running")
        assert running is not None
        assert "no worker answers for silent" in running.message
        failed = 'perdure_operator_reconciles_total{outcome="failed"}'

        async def failed_again() -> bool:
            return f"{failed} 2.0" in (await operator.metrics.text()).decode()

        await eventually(failed_again)
        assert played.events.count("Warning NoWorker") == 1


async def test_an_object_says_that_temporal_does_not_answer_and_its_job_starts_when_it_does(tmp_path: Path) -> None:
    played, server = PlayedObject("early"), DevServer(tmp_path / "temporal.db")
    link = TemporalLink(Endpoint(address=server.address))
    async with operating(played, link):
        await eventually(lambda: "Warning ControlPlaneUnreachable" in played.events, within=WITHIN)
        assert played.resource.status.phase == "PENDING"
        assert played.condition("Accepted") == ("Unknown", "ControlPlaneUnreachable")
        assert server.address in link.report()
        try:
            await server.start()
            await eventually(lambda: played.resource.status.phase == "STARTING")
            assert played.condition("Accepted") == ("True", "Valid")
            await eventually(lambda: "Normal Submitted" in played.events)
            assert link.report() == ""
        finally:
            server.kill()


async def test_a_finalizer_that_a_tool_removes_is_put_back_while_the_job_runs(temporal_client: TemporalClient) -> None:
    """Without it, the object's deletion would leave the job running."""
    played = PlayedObject("replaced")
    async with operating(played, Client(temporal=temporal_client)):
        await eventually(lambda: played.resource.status.run_id)
        assert played.resource.metadata.finalizers == (FINALIZER,)
        played.content["metadata"]["finalizers"] = []
        played.news.set()
        await eventually(lambda: played.resource.metadata.finalizers == (FINALIZER,), within=WITHIN)


async def test_an_object_is_free_once_its_job_has_ended(temporal_client: TemporalClient) -> None:
    """Whoever deletes it later, perhaps with its namespace, needs no operator."""
    played = PlayedObject("ended")
    async with operating(played, Client(temporal=temporal_client)):
        await eventually(lambda: played.resource.status.run_id)
        assert played.resource.metadata.finalizers == (FINALIZER,)
        await temporal_client.get_workflow_handle(played.resource.workflow_id).terminate()
        await eventually(lambda: played.resource.metadata.finalizers == (), within=WITHIN)
        assert played.resource.status.finished


async def test_an_object_is_freed_although_the_rights_in_its_namespace_go_before_it(
    temporal_client: TemporalClient,
) -> None:
    played = PlayedObject("orphan")
    async with operating(played, Client(temporal=temporal_client)) as operator:
        await eventually(lambda: played.resource.status.run_id)
        # What the cluster's own roles grant is left: to change the object itself.
        played.content["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "generation": 2}
        played.forbids = {"PATCH"}
        played.news.set()
        failed = 'perdure_operator_reconciles_total{outcome="failed"}'

        async def has_failed() -> bool:
            return f"{failed} 1.0" in (await operator.metrics.text()).decode()

        await eventually(has_failed, within=WITHIN)
        played.forbids = {"GET", "WATCH"}
        played.news.set()
        await temporal_client.get_workflow_handle(played.resource.workflow_id).terminate()
        await eventually(lambda: played.resource.metadata.finalizers == (), within=WITHIN)
