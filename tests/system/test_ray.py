"""Tests of jobs on a real Ray cluster of this machine, whose parts die one after another."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from typing import Any

import psutil
import pytest
import yaml

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.ray.backend import RayBackend
from perdure.activities.nodes.ray.settings import RaySettings
from perdure.contract import FailureClass, JobPhase, NodeRef
from perdure.contract.identity import NodeId
from scripts.ray_environment import interpreter
from tests.activities.test_ray_backend import request
from tests.support.allocation import REPOSITORY
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import ACTORS, actor_of, asked, incarnations, nothing_is_left, submitted, trained
from tests.system.site import SCRIPT, Job, Site

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(600)]


def takes_niceness_back() -> bool:
    """Whether a process of this user may have a lower niceness than it was given."""
    command = [sys.executable, "-c", "import os; os.nice(5); os.nice(-5)"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


async def test_a_job_of_torchrun_trains_on_two_machines_and_leaves_nothing(cluster: RayCluster, ray_site: Site):
    await cluster.start(machines=2)
    job = await submitted(ray_site, script=SCRIPT)
    await job.running(nodes=2)
    await job.stepping(generation=1, ranks=2)
    raylets = {cluster.machine_of(job.processes(node, kind="launcher")[0]).pid for node in (0, 1)}
    assert len(raylets) == 2
    # Ray's workers give way to all others, and with them the ranks: an agent that did would lose its lease.
    niceness = {kind: job.processes(0, kind=kind)[0].nice() for kind in ("agent", "rank")}
    assert niceness == {"agent": 0 if takes_niceness_back() else 15, "rank": 15}
    # A rank restarts in place.
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    assert {node.incarnation for node in await ray_site.client.nodes(job.name)} == {1}
    job.finish()
    result = await ray_site.client.wait(job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 1)
    await job.wound_down()
    await nothing_is_left(cluster, job)


async def test_the_job_of_the_example_trains_to_its_end(cluster: RayCluster, ray_site: Site):
    await cluster.start(machines=2)
    # A copy: scripts write into the folder that they run in, and the job has fewer steps.
    shutil.copytree(REPOSITORY / "examples", ray_site.folder / "examples")
    path = ray_site.folder / "examples" / "11-ray" / "job.yaml"
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    content["roles"]["worker"]["command"] += ["--steps", "20"]
    path.write_text(yaml.safe_dump(content))
    await ray_site.client.submit(path)
    job = Job(ray_site.client, content["name"], (await ray_site.client.status(content["name"])).uid, ray_site.folder)
    ray_site.jobs.append(job)
    ended = await ray_site.client.wait(job.name)
    assert (ended.phase, ended.restarts) == (JobPhase.SUCCEEDED, 0)
    await job.wound_down()
    await nothing_is_left(cluster, job)


async def test_an_actor_killed_is_replaced_and_leaves_no_process(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 2)
    before = job.processes(1)
    actor_of(job, 1).kill()
    await job.running(nodes=2, after=1)
    assert await incarnations(ray_site, job) == [1, 2]
    assert {incident.failure for incident in await job.incidents()} == {FailureClass.NODE_LOST}
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
