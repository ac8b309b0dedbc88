"""Tests of the watch over a cluster on a real server: what users read, what jobs are advised, and who may be away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import UnsandboxedWorkflowRunner, Worker
from typer.testing import CliRunner

from perdure.activities.cluster.activities import watching_clusters
from perdure.activities.cluster.settings import ClusterSettings, cluster_settings
from perdure.activities.nodes.joined.backend import JoinedBackend
from perdure.activities.nodes.local.backend import LocalBackend
from perdure.activities.nodes.machines import Machines, MachineSeen, MachinesUnknown, Owner, Use
from perdure.base.errors import NoWorker
from perdure.cli.main import app
from perdure.client.cluster import read_clusters
from perdure.client.connection import Connection, Endpoint
from perdure.contract import (
    JobPhase,
    JobStatus,
    NodePhase,
    NodesQuery,
    NodesSuggested,
    NodeView,
    RoomSeen,
    ScalingView,
    SharingPolicy,
    SmallerRequest,
)
from perdure.contract.names import TRAINING_JOB, cluster_workflow_id
from perdure.spec.job import Backend
from perdure.workflows import cluster as cluster_workflow
from perdure.workflows.cluster import Cluster
from tests.activities.history.stored import status
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually

NODE = {"cpu": 8.0}
PATIENCE = 60


@workflow.defn(name=TRAINING_JOB)
class AdvisedJob:
    """Answers as a job does, and keeps the advice that it gets."""

    def __init__(self) -> None:
        self._status: JobStatus | None = None
        self._advice: list[NodesSuggested] = []
        self._room: list[RoomSeen] = []

    @workflow.run
    async def run(self, _: Any) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.signal
    def play(self, status: JobStatus) -> None:
        self._status = status

    @workflow.signal
    def suggest_nodes(self, advice: NodesSuggested) -> None:
        self._advice.append(advice)

    @workflow.signal
    def room_seen(self, seen: RoomSeen) -> None:
        self._room.append(seen)

    @workflow.query
    def room(self) -> list[RoomSeen]:
        return self._room

    @workflow.query
    def advice(self) -> list[NodesSuggested]:
        return self._advice

    @workflow.query
    def nodes(self, request: NodesQuery) -> list[NodeView]:
        found = {"incarnation": 1, "uid": "00000000", "role": request.role, "since": datetime.now(UTC)}
        return [NodeView(rank=rank, phase=NodePhase.READY, host="my-laptop", **found) for rank in range(2)]

    @workflow.query
    def status(self, role: str | None = None) -> JobStatus:
        assert self._status is not None
        return self._status.replace(role=role)


class MadeBackend(LocalBackend):
    """A backend with the machines of the test."""

    name = "kubernetes"

    def __init__(self) -> None:
        self.seen = Machines()
        self.seen.machines["gpu-1"] = MachineSeen({"cpu": 40.0})
        self.refused = ""
        self.listed = asyncio.Event()
        self.listed.set()
        self.changed = asyncio.Event()

    def put(self, owner: str, rank: int, machine: str = "gpu-1") -> None:
        self.seen.put(f"{owner}-{rank}", Use(machine, NODE, Owner(owner, "trainer"), "" if machine else "no room"))
        self.changed.set()

    async def machines(self) -> AsyncGenerator[Machines]:
        await self.listed.wait()
        while True:
            if self.refused:
                raise MachinesUnknown(self.refused)
            yield self.seen
            await self.changed.wait()
            self.changed.clear()


@pytest.fixture
async def queue(
    temporal_client: Client, temporal_server: DevServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    """A worker of played jobs, as the command finds it."""
    queue = f"cluster-{uuid4().hex[:8]}"
    for name, value in temporal_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PERDURE_TASK_QUEUE", queue)
    async with Worker(
        temporal_client,
        task_queue=queue,
        workflows=[AdvisedJob, Cluster],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        yield queue


@asynccontextmanager
async def watched(client: Client, queue: str, backend: LocalBackend | JoinedBackend) -> AsyncGenerator[None]:
    async with watching_clusters(client, [backend], task_queue=queue, sharing=SharingPolicy.THROUGHPUT):
        try:
            yield
        finally:
            await client.get_workflow_handle(cluster_workflow_id(queue, backend.name)).terminate()


async def start(client: Client, queue: str, name: str, *, backend: str, **fields: Any) -> WorkflowHandle[Any, None]:
    spec = {
        "name": name,
        "namespace": "nlp",
        "backend": backend,
        "roles": {
            "trainer": {
                "nodes": "1:4",
                "image": "acme/llama:1",
                "command": ["torchrun", "train.py"],
                "scaling": {"share": backend != "joined"},
            }
        },
    }
    job_id = f"job/nlp/{name}"
    handle = await client.start_workflow(AdvisedJob.run, spec, id=job_id, task_queue=queue)
    scaling = ScalingView(fewest=1, largest=4, min_efficiency=0.7, shares=backend != "joined")
    known = {"name": name, "uid": name[-8:], "nodes_min": 1, "backend": backend, "scaling": scaling} | fields
    await handle.signal("play", status(**known))
    return handle


async def until_seen(client: Client, queue: str, backend: Backend, *words: str) -> None:
    """Returns once what the worker has seen of the cluster holds these words: commands show it then."""
    endpoint = Endpoint(address=client.service_client.config.target_host, namespace=client.namespace, task_queue=queue)
    connection = Connection(temporal=client, endpoint=endpoint)

    async def holds() -> bool:
        try:
            [view] = await read_clusters(connection, [backend])
        except NoWorker:
            return False
        return all(word in view.model_dump_json() for word in words)

    await eventually(holds, within=PATIENCE, what=f"{words} are seen")


async def shown(*options: str) -> str:
    given = ["cluster", *options]
    result = await asyncio.to_thread(CliRunner().invoke, app, given, None, {"COLUMNS": "200"})
    return result.output if result.exit_code == 0 else f"failed: {result.output} {result.exception}"


async def test_a_view_shows_machines_jobs_and_what_keeps_it_from_knowing_more(
    temporal_client: Client, queue: str
) -> None:
    assert "no worker watches machines" in await shown()
    backend = MadeBackend()
    first = await start(temporal_client, queue, f"first-{uuid4().hex[:8]}", backend="kubernetes")
    name = first.id.rpartition("/")[2]
    for rank in range(4):
        backend.put(name[-8:], rank)
    backend.put(name[-8:], 4, machine="")
    backend.seen.put("other", Use("gpu-1", {"cpu": 2.0}, None))
    async with watched(temporal_client, queue, backend):
        await until_seen(temporal_client, queue, Backend.KUBERNETES, name, "no room")
        text = await shown("-n", "nlp")
        assert f"{name} 4" in text
        assert "others 1" in text
        assert "4 of 1:4" in text
        assert "1 node: no room" in text
        assert name not in await shown()
        [view] = json.loads(await shown("-A", "--backend", "kubernetes", "-o", "json"))
        assert view["machines"][0]["free"]["cpu"] == 6
        backend.refused = "the API server does not let the worker list machines"
        backend.changed.set()
        await until_seen(temporal_client, queue, Backend.KUBERNETES, "does not let the worker")
        assert "does not let the worker" in await shown("-n", "nlp")
    await first.terminate()


async def test_what_was_seen_is_shown_while_the_next_worker_lists_the_machines(
    temporal_client: Client, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_workflow, "_HEARTBEAT", timedelta(seconds=2))
    backend = MadeBackend()
    workflow_id = cluster_workflow_id(queue, backend.name)

    async def attempt(number: int) -> bool:
        found = (await temporal_client.get_workflow_handle(workflow_id).describe()).raw_description
        return any(one.attempt >= number for one in found.pending_activities)

    async def one_machine() -> str | None:
        text = await shown()
        return text if "gpu-1" in text and "being listed" not in text else None

    async with watching_clusters(temporal_client, [backend], task_queue=queue, sharing=None):
        await until_seen(temporal_client, queue, Backend.KUBERNETES, "gpu-1")
        assert await one_machine()
    backend.listed.clear()
    async with watched(temporal_client, queue, backend):
        await eventually(lambda: attempt(2), within=PATIENCE)
        assert await one_machine()
        backend.seen.machines["gpu-2"] = MachineSeen({"cpu": 40.0})
        backend.listed.set()
        await until_seen(temporal_client, queue, Backend.KUBERNETES, "gpu-2")
        assert "gpu-2" in await shown()


async def test_a_workflow_that_continues_as_new_watches_on(temporal_client: Client, queue: str) -> None:
    backend = MadeBackend()
    async with watched(temporal_client, queue, backend):
        handle = temporal_client.get_workflow_handle(cluster_workflow_id(queue, backend.name))

        await until_seen(temporal_client, queue, Backend.KUBERNETES, "gpu-1")
        before = await handle.describe()
        [pending] = before.raw_description.pending_activities
        watch = temporal_client.get_async_activity_handle(
            workflow_id=before.id, run_id=before.run_id, activity_id=pending.activity_id
        )
        await watch.complete()

        async def continued() -> bool:
            return (await handle.describe()).run_id != before.run_id

        await eventually(continued, within=PATIENCE)
        backend.seen.machines["gpu-2"] = MachineSeen({"cpu": 40.0})
        backend.changed.set()
        await until_seen(temporal_client, queue, Backend.KUBERNETES, "gpu-2")
        assert "gpu-2" in await shown()


@pytest.mark.long("workflows")
async def test_jobs_that_share_are_advised_of_each_other(temporal_client: Client, queue: str) -> None:
    backend = MadeBackend()
    backend.seen.machines["gpu-1"] = MachineSeen({"cpu": 32.0})
    names = [f"{name}-{uuid4().hex[:8]}" for name in ("first", "second")]
    first = await start(temporal_client, queue, names[0], backend="kubernetes", nodes_max=4)
    waits = {"phase": JobPhase.STARTING, "nodes": 0, "nodes_max": 4}
    second = await start(temporal_client, queue, names[1], backend="kubernetes", **waits)
    for rank in range(4):
        backend.put(names[0][-8:], rank)
        backend.put(names[1][-8:], rank, machine="")

    async def advised(job: WorkflowHandle[Any, None]) -> NodesSuggested | None:
        known = await job.query("advice", result_type=list[NodesSuggested])
        return known[0] if known else None

    async with watched(temporal_client, queue, backend):
        told = await eventually(lambda: advised(second), within=PATIENCE)
        assert (told.nodes, [one.job for one in told.of]) == (2, [names[0]])
        told = await eventually(lambda: advised(first), within=PATIENCE)
        assert (told.nodes, [one.job for one in told.to]) == (2, [names[1]])
    await first.terminate()
    await second.terminate()


@pytest.mark.long("workflows")
async def test_a_job_is_told_whether_less_would_fit(temporal_client: Client, queue: str) -> None:
    backend = MadeBackend()
    backend.seen.machines["gpu-1"] = MachineSeen({"cpu": 8.0})
    name = f"large-{uuid4().hex[:8]}"
    smaller = (SmallerRequest(resource="cpu", requested="8", enough="6", relaxes=True, nodes=(1,)),)
    job = await start(temporal_client, queue, name, backend="kubernetes", smaller=smaller)
    backend.seen.put("other", Use("gpu-1", {"cpu": 4.0}, None))
    backend.put(name[-8:], 1, machine="")

    async def told(count: int) -> list[bool]:
        known = await job.query("room", result_type=list[RoomSeen])
        assert all(one.requests == {"cpu": "6"} for one in known)
        return [one.fits for one in known] if len(known) == count else []

    async with watched(temporal_client, queue, backend):
        assert await eventually(lambda: told(1), within=PATIENCE) == [False]
        backend.seen.drop("other")
        backend.changed.set()
        assert await eventually(lambda: told(2), within=PATIENCE) == [False, True]
    await job.terminate()


async def test_machines_that_join_are_seen_by_what_their_jobs_say(temporal_client: Client, queue: str) -> None:
    job = await start(temporal_client, queue, f"home-{uuid4().hex[:8]}", backend="joined")
    name = job.id.rpartition("/")[2]
    async with watched(temporal_client, queue, JoinedBackend()):
        await until_seen(temporal_client, queue, Backend.JOINED, name, "my-laptop")
        text = await shown("-n", "nlp")
        assert f"{name} 2" in text
        assert "my-laptop" in text
    await job.terminate()


@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({}, ClusterSettings()),
        ({"PERDURE_CLUSTER": "off"}, ClusterSettings(watched=False)),
        ({"PERDURE_SHARING": "fair"}, ClusterSettings(sharing=SharingPolicy.FAIR)),
        ({"PERDURE_SHARING": "off"}, ClusterSettings(sharing=None)),
    ],
)
def test_a_site_chooses_what_is_watched_and_shared(variables: dict[str, str], settings: ClusterSettings) -> None:
    assert cluster_settings(variables) == settings


@pytest.mark.parametrize("variable", ["PERDURE_CLUSTER", "PERDURE_SHARING"])
def test_a_wrong_setting_is_named(variable: str) -> None:
    with pytest.raises(ValueError, match=f'{variable}: got "maybe"'):
        cluster_settings({variable: "maybe"})
