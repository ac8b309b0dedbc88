"""Tests of jobs on a real Ray cluster of this machine, whose parts die one after another."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.ray.backend import RayBackend
from perdure.activities.nodes.ray.settings import RaySettings
from perdure.base.state_folder import StateFolder
from perdure.contract import JobPhase, NodeRef
from perdure.contract.identity import NodeId
from perdure.local.control_plane import LocalControlPlane
from scripts.ray_environment import interpreter
from tests.activities.test_ray_backend import request
from tests.system.ray_cluster import RayCluster
from tests.system.site import SCRIPT, WALK, Job, Site

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(600)]


@pytest.fixture
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RayCluster]:
    """A head without processors, and machines as a test adds them."""
    # Ray's sockets lie in the folder, whose path must be short.
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder))
        try:
            yield cluster
        finally:
            await cluster.stop()


@pytest.fixture
async def ray_site(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A Perdure of the test's own, whose worker serves the cluster."""
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PERDURE_STATE", str(tmp_path / "state"))
    plane = LocalControlPlane(StateFolder(tmp_path / "state"))
    site = Site(tmp_path, plane)
    await site.start()
    try:
        yield site
    finally:
        await site.end_jobs()
        await plane.stop_worker()
        await plane.stop_server()


def ask(cluster: RayCluster, code: str) -> Any:
    """Runs code with Ray, connected to the cluster as the backend is; returns what it assigns to `found`."""
    program = (
        f"import json, ray\nray.init({cluster.address!r}, namespace='perdure', logging_level='ERROR')\n{code}\n"
        "print('\\n' + json.dumps(found))"
    )
    answer = subprocess.run(
        [str(interpreter()), "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


ACTORS = "found = ray.util.list_named_actors(all_namespaces=True)"
GROUPS = "found = [g['state'] for g in ray.util.placement_group_table().values() if g['state'] != 'REMOVED']"


async def asked(cluster: RayCluster, code: str) -> Any:
    return await asyncio.to_thread(ask, cluster, code)


async def submitted(site: Site, *arguments: str, nodes: str = "2", script: Path = WALK, **spec: Any) -> Job:
    return await site.submit(*arguments, nodes=nodes, script=script, backend="ray", **spec)


async def nothing_is_left(cluster: RayCluster, job: Job) -> None:
    assert not job.processes()
    assert await asked(cluster, ACTORS) == []
    assert await asked(cluster, GROUPS) == []


async def test_a_job_of_torchrun_trains_on_two_machines_and_leaves_nothing(cluster: RayCluster, ray_site: Site):
    await cluster.start(machines=2)
    job = await submitted(ray_site, script=SCRIPT)
    await job.running(nodes=2)
    await job.stepping(generation=1, ranks=2)
    raylets = {cluster.machine_of(job.processes(node, kind="launcher")[0]).pid for node in (0, 1)}
    assert len(raylets) == 2
    # A rank restarts in place.
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    assert {node.incarnation for node in await ray_site.client.nodes(job.name)} == {1}
    job.finish()
    result = await ray_site.client.wait(job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 1)
    await job.wound_down()
    await nothing_is_left(cluster, job)


async def trained(cluster: RayCluster, site: Site, machines: int, *arguments: str, **spec: Any) -> Job:
    """A job of two nodes that trains."""
    await cluster.start(machines=machines)
    job = await submitted(site, *arguments, **spec)
    await job.running(nodes=2)
    return job


def actor_of(job: Job, node: int) -> psutil.Process:
    """The process in which Ray runs the actor of a node."""
    launcher = job.processes(node, kind="launcher")[0]
    return next(one for one in launcher.parents() if "ray::" in " ".join(one.cmdline()[:1]))


async def incarnations(site: Site, job: Job) -> list[int]:
    return [node.incarnation for node in await site.client.nodes(job.name)]


async def test_an_actor_killed_is_replaced_and_leaves_no_process(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 2)
    before = job.processes(1)
    actor_of(job, 1).kill()
    await job.running(nodes=2, after=1)
    assert await incarnations(ray_site, job) == [1, 2]
    _, left = await asyncio.to_thread(psutil.wait_procs, before, 30)
    assert not left
    await ray_site.end_jobs()
    await job.wound_down()
    await nothing_is_left(cluster, job)


async def test_a_lost_machine_has_its_node_on_another_one(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 3)
    lost = cluster.machine_of(job.processes(1, kind="launcher")[0])
    raylet = cluster.raylet(lost)
    assert raylet is not None
    raylet.kill()
    await job.running(nodes=2, after=1)
    assert cluster.machine_of(job.processes(1, kind="launcher")[0]) is not lost
    text = " ".join(str(incident) for incident in await job.incidents())
    assert "node" in text


async def test_an_actor_of_another_owner_is_refused_by_name_and_left_alone(cluster: RayCluster):
    await cluster.start(machines=1)
    node = request()
    foreign = (
        "@ray.remote(num_cpus=0)\nclass Other:\n    pass\n"
        f"other = Other.options(name={node.name!r}, lifetime='detached').remote()\n"
        "ray.get(other.__ray_ready__.remote())\nfound = True"
    )
    assert await asked(cluster, foreign)
    backend = RayBackend(RaySettings(address=cluster.address, python=str(interpreter())))
    try:
        with pytest.raises(NodeRefused, match=f"an actor {node.name} that is no node exists.*another name"):
            await backend.create(node)
        ref = NodeRef(**dict(node.node.part(NodeId)), name=node.name, backend="ray", namespace="default")
        await backend.delete(ref)
    finally:
        await backend.close()
    assert [one["name"] for one in await asked(cluster, ACTORS)] == [node.name]
