"""Tests of several connections of workers to one real Ray cluster, one after the other and at once, and of connections
through Ray's client."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.activities.nodes.ray.backend import RayBackend
from perdure.activities.nodes.ray.settings import RaySettings
from perdure.contract import FailureClass, JobPhase, NodeEvent, NodeEventKind, NodeRef, NodeRequest
from perdure.contract.identity import NodeId
from scripts.ray_environment import interpreter
from tests.activities.test_ray_backend import request
from tests.support.waiting import eventually
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import ACTORS, GROUPS, actor_of, asked, incarnations, nothing_is_left, submitted, trained
from tests.system.site import Site

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(600)]

NODE = """#!{python}
import json, os, sys
sys.stdin.readline()
for line in sys.stdin:
    os.write(int(sys.argv[4]), json.dumps({{"reason": "it left: " + json.loads(line)["reason"]}}).encode())
    break
"""
"""What an actor starts: a node that leaves as soon as it is asked to, and says why."""


class Workers:
    """Backends of workers that serve one cluster."""

    def __init__(self, cluster: RayCluster, folder: Path, opened: AsyncExitStack) -> None:
        self._settings = RaySettings(address=cluster.address, python=str(interpreter()))
        self._opened = opened
        self._node = folder / "node"
        self._node.write_text(NODE.format(python=sys.executable))
        self._node.chmod(0o755)

    def new(self) -> RayBackend:
        backend = RayBackend(self._settings)
        self._opened.push_async_callback(backend.close)
        return backend

    def request(self) -> NodeRequest:
        """A node that needs no control plane."""
        return request(worker={"nodes": 1, "command": ["true"], "python": str(self._node)})


@pytest.fixture
async def workers(cluster: RayCluster, tmp_path: Path) -> AsyncIterator[Workers]:
    await cluster.start(machines=1)
    async with AsyncExitStack() as opened:
        yield Workers(cluster, tmp_path, opened)


def ref_of(node: NodeRequest, *, grace: float = 30.0) -> NodeRef:
    identity = dict(node.node.part(NodeId))
    return NodeRef(
        **identity,
        name=node.name,
        backend="ray",
        namespace="default",
        grace=timedelta(seconds=grace),
        winding_down=True,
    )


async def becomes(backend: RayBackend, node: NodeRequest, kind: NodeEventKind) -> NodeEvent:
    async def event() -> NodeEvent | None:
        found = await backend.describe(ref_of(node))
        return found if found is not None and found.kind is kind else None

    return await eventually(event, what=f"the node as {kind}", within=60)


async def test_each_connection_learns_how_a_node_ended(cluster: RayCluster, workers: Workers):
    node, backends = workers.request(), [workers.new() for _ in range(3)]
    await backends[0].create(node)
    for backend in backends:
        await becomes(backend, node, NodeEventKind.RUNNING)
    # A worker that has ended leaves its call in the actor.
    await backends[0].close()
    assert await asked(cluster, f"ray.get(ray.get_actor({node.name!r}).leave.remote('so', False))\nfound = True")
    for backend in backends[1:]:
        assert (await becomes(backend, node, NodeEventKind.GONE)).reason == "it left: so"
    await backends[1].delete(ref_of(node))
    assert await asked(cluster, ACTORS) == []
    assert await asked(cluster, GROUPS) == []


async def test_a_node_gets_its_grace_from_a_worker_that_did_not_know_it(workers: Workers):
    node, first, second = workers.request(), workers.new(), workers.new()
    await first.create(node)
    await becomes(first, node, NodeEventKind.RUNNING)
    await second.delete(ref_of(node))
    assert (await becomes(first, node, NodeEventKind.GONE)).reason == "it left: deleted"


class TestThroughRaysClient:
    """Of a worker outside of the cluster's network, as that of deploy/ray is."""

    @pytest.fixture
    async def cluster(self) -> AsyncIterator[RayCluster]:
        with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            cluster = RayCluster(Path(folder), through_client=True)
            try:
                yield cluster
            finally:
                await cluster.stop()

    async def test_a_job_trains_and_its_dead_actor_is_replaced_and_nothing_is_left(
        self, cluster: RayCluster, ray_site: Site
    ):
        job = await trained(cluster, ray_site, 2)
        actor_of(job, 1).kill()
        known = await job.running(nodes=2, after=1)
        assert await incarnations(ray_site, job) == [1, 2]
        assert {incident.failure for incident in await job.incidents()} == {FailureClass.NODE_LOST}
        await job.stepping(generation=known.generation, ranks=2)
        job.finish()
        assert (await ray_site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
        await job.wound_down()
        await nothing_is_left(cluster, job)

    async def test_a_lost_machine_has_its_node_on_another_one(self, cluster: RayCluster, ray_site: Site):
        job = await trained(cluster, ray_site, 3)
        lost = cluster.machine_of(job.processes(1, kind="launcher")[0])
        raylet = cluster.raylet(lost)
        assert raylet is not None
        raylet.kill()
        await job.running(nodes=2, after=1)
        assert cluster.machine_of(job.processes(1, kind="launcher")[0]) is not lost
        await ray_site.end_jobs()
        await job.wound_down()
        await nothing_is_left(cluster, job)

    async def test_a_node_leaves_a_machine_that_ray_drains(self, cluster: RayCluster, ray_site: Site):
        job = await trained(cluster, ray_site, 3)
        drained = cluster.machine_of(job.processes(1, kind="launcher")[0])
        assert not await cluster.drain(drained)
        await job.running(nodes=2, after=1)
        assert cluster.machine_of(job.processes(1, kind="launcher")[0]) is not drained
        (incident,) = await job.incidents()
        assert incident.failure is FailureClass.PREEMPTED
        assert "Ray drain" in str(incident.evidence)
        await ray_site.end_jobs()
        await job.wound_down()
        await nothing_is_left(cluster, job)

    async def test_a_job_that_is_cancelled_while_it_waits_for_room_leaves_nothing(
        self, cluster: RayCluster, ray_site: Site
    ):
        await cluster.start(machines=1)
        job = await submitted(ray_site)
        await job.until(lambda status: 'it demands 2 x {"CPU": 1}' in str(status))
        await ray_site.end_jobs()
        await job.wound_down()
        await nothing_is_left(cluster, job)
