"""Tests of jobs on a real Ray cluster that lacks room, drains machines, loses its head, or is used by others."""

from __future__ import annotations

import signal
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.ray.backend import RayBackend
from perdure.activities.nodes.ray.placement import group_of
from perdure.activities.nodes.ray.settings import RaySettings
from perdure.contract import FailureClass, IncidentView, JobPhase, NodeEvent, NodeEventKind, NodeRef
from perdure.contract.identity import NodeId
from perdure.spec.data import Workdir, WorkdirArchive
from scripts.ray_environment import interpreter
from tests.activities.test_ray_backend import request
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.made_steps import steps
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import (
    ACTORS,
    GROUPS,
    actor_of,
    asked,
    evicted,
    group_removed,
    incarnations,
    nothing_is_left,
    submitted,
    trained,
    waits_for_room,
)
from tests.system.site import PATIENCE, Job, Site

EXAMPLE = REPOSITORY / "examples" / "04-checkpoints" / "plain.py"

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(600)]


async def cancelled(cluster: RayCluster, site: Site, job: Job) -> None:
    """Cancels the job, which leaves nothing."""
    await site.end_jobs()
    await job.wound_down()
    await nothing_is_left(cluster, job)


async def preempted(job: Job) -> IncidentView:
    """The job's only incident, which names the drain."""
    (incident,) = await job.incidents()
    assert incident.failure is FailureClass.PREEMPTED
    assert "Ray drain" in str(incident.evidence)
    return incident


async def test_two_jobs_of_one_name_share_a_cluster(cluster: RayCluster, ray_site: Site):
    await cluster.start(machines=2)
    others = Site(ray_site.folder, ray_site.control_plane)
    await others.start()
    others.client.namespace = "other"
    name = f"s-{uuid4().hex[:8]}"
    job = await submitted(ray_site, name=name, nodes="1")
    other = await submitted(others, name=name, nodes="1", namespace="other")
    await job.running(nodes=1)
    await other.running(nodes=1)
    await ray_site.end_jobs()
    await job.wound_down()
    assert await asked(cluster, GROUPS) == ["CREATED"]
    await other.undisturbed(ranks=1, seconds=2)
    await cancelled(cluster, others, other)


async def test_a_job_waits_for_room_in_rays_words_while_its_worker_dies(cluster: RayCluster, ray_site: Site):
    job = await waits_for_room(cluster, ray_site)
    ray_site.control_plane.kill_worker()
    await cluster.add()
    await ray_site.control_plane.ensure()
    await job.running(nodes=2)
    assert await asked(cluster, GROUPS) == ["CREATED"]
    assert await incarnations(ray_site, job) == [1, 1]
    await cancelled(cluster, ray_site, job)


async def test_a_runtime_environment_that_cannot_be_built_is_named(cluster: RayCluster, ray_site: Site):
    await cluster.start(machines=2)
    environment = {"working_dir": "file:///missing/code.zip"}
    job = await submitted(ray_site, ray={"runtime_env": environment})
    result = await ray_site.client.wait(job.name)
    assert result.phase is JobPhase.FAILED
    text = " ".join(str(incident) for incident in await job.incidents())
    assert "its ray.runtime_env cannot be built" in text
    assert "/missing/code.zip" in text
    await job.wound_down()
    await nothing_is_left(cluster, job)


async def test_a_node_leaves_a_machine_that_ray_drains(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 3)
    drained = cluster.machine_of(job.processes(1, kind="launcher")[0])
    assert not await cluster.drain(drained)
    await job.running(nodes=2, after=1)
    assert cluster.machine_of(job.processes(1, kind="launcher")[0]) is not drained
    await preempted(job)
    await cancelled(cluster, ray_site, job)


async def test_a_node_stores_a_checkpoint_before_a_drained_machine_is_taken(cluster: RayCluster, ray_site: Site):
    out = ray_site.folder / "out"
    await cluster.start(machines=3)
    job = await submitted(
        ray_site,
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
        checkpoint={"storage": f"file://{ray_site.folder / 'stored'}", "every": 1_000_000},
    )
    job.out = out
    await job.running(nodes=2)
    await eventually(lambda: steps(job, 0)[10:], what="steps", within=PATIENCE)
    reached = steps(job, 0)[-1]
    drained = cluster.machine_of(job.processes(1, kind="launcher")[0])
    assert not await cluster.drain(drained)
    known = await job.until(lambda status: status.checkpoint.restored_generation > 1)
    assert (known.checkpoint.step or 0) > reached
    assert cluster.machine_of(job.processes(1, kind="launcher")[0]) is not drained
    await preempted(job)
    await cancelled(cluster, ray_site, job)


async def test_a_machine_taken_as_soon_as_it_is_drained_is_one_that_ray_drained(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 3)
    drained = cluster.machine_of(job.processes(1, kind="launcher")[0])
    raylet = cluster.raylet(drained)
    assert raylet is not None
    assert not await cluster.drain(drained, seconds=1)
    raylet.kill()
    await job.running(nodes=2, after=1)
    await preempted(job)
    await cancelled(cluster, ray_site, job)


async def test_an_idle_machine_is_drained_without_the_job_and_one_that_is_used_is_not(
    cluster: RayCluster, ray_site: Site
):
    job = await trained(cluster, ray_site, 3)
    used = [cluster.machine_of(job.processes(node, kind="launcher")[0]) for node in (0, 1)]
    (idle,) = (machine for machine in cluster.machines if machine not in used)
    assert "no longer idle" in await cluster.drain(used[0], seconds=None)
    assert not await cluster.drain(idle, seconds=None)
    await job.undisturbed(ranks=2, seconds=5)
    await cancelled(cluster, ray_site, job)


async def test_a_placement_group_removed_by_hand_is_made_again(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 2)
    await group_removed(cluster)
    await job.running(nodes=2, after=1)
    assert await incarnations(ray_site, job) == [2, 2]
    await cancelled(cluster, ray_site, job)


async def test_a_node_that_rays_memory_monitor_kills_has_a_class_of_its_own(cluster: RayCluster, ray_site: Site):
    job = await evicted(cluster, ray_site)
    await cancelled(cluster, ray_site, job)


FILL_STORES = """
@ray.remote(num_cpus=0)
class Filler:
    def fill(self):
        self.kept = []
        try:
            for _ in range(300):
                self.kept.append(ray.put(bytes(1_000_000)))
        except Exception as error:
            return f"{type(error).__name__} after {len(self.kept)} MB"
        return "it takes more"
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
fillers = [
    Filler.options(
        name=node["NodeID"], namespace="other", lifetime="detached",
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    ).remote()
    for node in ray.nodes()
]
found = ray.get([filler.fill.remote() for filler in fillers])
"""
"""Another job of the cluster, which leaves no room in the object store of any machine."""
END_FILLERS = """
for one in ray.util.list_named_actors(all_namespaces=True):
    if one["namespace"] == "other":
        ray.kill(ray.get_actor(one["name"], "other"))
found = True
"""


async def test_full_object_stores_hinder_no_node(cluster: RayCluster, ray_site: Site):
    cluster.never_spill()
    job = await trained(cluster, ray_site, 2)
    full = await asked(cluster, FILL_STORES)
    assert len(full) == 3
    assert all("Error after" in one for one in full), full
    await job.undisturbed(ranks=2, seconds=5)
    actor_of(job, 1).kill()
    await job.running(nodes=2, after=1)
    assert await incarnations(ray_site, job) == [1, 2]
    await ray_site.end_jobs()
    await job.wound_down()
    assert await asked(cluster, END_FILLERS)
    await nothing_is_left(cluster, job)


async def test_a_rank_that_finds_its_object_store_full_fails_in_rays_words(cluster: RayCluster, ray_site: Site):
    cluster.never_spill()
    await cluster.start(machines=1)
    script = ray_site.folder / "puts.py"
    script.write_text("import ray\nray.init()\nkept = [ray.put(bytes(1_000_000)) for _ in range(300)]\n")
    job = await submitted(ray_site, nodes="1", command=[str(interpreter()), str(script)], retry={"max_restarts": 0})
    result = await ray_site.client.wait(job.name)
    assert result.phase is JobPhase.FAILED
    (incident,) = await job.incidents()
    assert incident.failure is FailureClass.USER_CODE
    assert "ray.exceptions.OutOfDiskError" in str(incident)
    await job.wound_down()
    await nothing_is_left(cluster, job)


async def test_training_outlives_the_head_and_is_requested_again_where_it_lost_its_tables(
    cluster: RayCluster, ray_site: Site
):
    job = await trained(cluster, ray_site, 2, workdir=None)
    cluster.gcs().kill()
    await job.undisturbed(ranks=2, seconds=10)
    await cluster.start_head()
    for _ in range(2):
        await cluster.add()
    await job.running(nodes=2, after=1)
    assert await incarnations(ray_site, job) == [2, 2]
    await cancelled(cluster, ray_site, job)


async def test_a_head_with_fault_tolerance_has_the_jobs_actors_again(cluster: RayCluster, ray_site: Site, redis: Path):
    await cluster.keep_tables(redis)
    job = await trained(cluster, ray_site, 3)
    await cluster.kill_head()
    await job.undisturbed(ranks=2, seconds=10)
    await cluster.start_head()
    assert len(await asked(cluster, ACTORS)) == 2
    await job.undisturbed(ranks=2, seconds=10)
    assert (await job.status()).restarts_total == 0
    assert await incarnations(ray_site, job) == [1, 1]
    # The new head tells the job what happens to them, and starts others with the code of before.
    actor_of(job, 1).kill()
    await job.running(nodes=2, after=1)
    assert await incarnations(ray_site, job) == [1, 2]
    await cancelled(cluster, ray_site, job)


async def test_a_cluster_that_hangs_costs_a_job_no_decision(cluster: RayCluster, ray_site: Site):
    job = await trained(cluster, ray_site, 3)
    log = ray_site.state.path / "worker" / "worker.log"
    gcs = cluster.gcs()
    gcs.send_signal(signal.SIGSTOP)
    await eventually(lambda: "did not answer within" in log.read_text(), what="a call without an answer")
    await job.undisturbed(ranks=2, seconds=5)
    gcs.send_signal(signal.SIGCONT)
    await job.undisturbed(ranks=2, seconds=5)
    assert (await job.status()).restarts_total == 0
    assert await incarnations(ray_site, job) == [1, 1]
    # What happens from then on is known again.
    actor_of(job, 1).kill()
    await job.running(nodes=2, after=1)
    assert await incarnations(ray_site, job) == [1, 2]
    await cancelled(cluster, ray_site, job)


async def test_a_worker_killed_before_the_actors_finds_its_placement_group(cluster: RayCluster):
    await cluster.start(machines=1)
    node = request(worker={"nodes": 1, "command": ["true"]})
    group = group_of(node)
    left = (
        f"ray.get(ray.util.placement_group([{group['bundle']!r}], strategy='STRICT_SPREAD', name={group['name']!r}, "
        "lifetime='detached').ready())\nfound = True"
    )
    assert await asked(cluster, left)
    backend = RayBackend(RaySettings(address=cluster.address, python=str(interpreter())))
    try:
        for _ in range(2):
            await backend.create(node)
        assert await asked(cluster, GROUPS) == ["CREATED"]
        assert [one["name"] for one in await asked(cluster, ACTORS)] == [node.name]
        ref = NodeRef(**dict(node.node.part(NodeId)), name=node.name, backend="ray", namespace="default")
        await backend.delete(ref)
        assert await asked(cluster, ACTORS) == []
        assert await asked(cluster, GROUPS) == []
    finally:
        await backend.close()


async def test_code_that_a_new_head_does_not_have_is_named(cluster: RayCluster):
    await cluster.start(machines=1)
    node = request(worker={"nodes": 1, "command": ["true"]})
    archive = WorkdirArchive(name=f"perdure-workdir-{0:016x}", parts=1, digest="sha256:" + "0" * 64)
    spec = node.spec.model_copy(update={"workdir": Workdir(path="/", archive=archive)})
    node = node.model_copy(update={"spec": spec})
    ref = NodeRef(**dict(node.node.part(NodeId)), name=node.name, backend="ray", namespace="default")
    backend = RayBackend(RaySettings(address=cluster.address, python=str(interpreter())))

    async def gone() -> NodeEvent | None:
        event = await backend.describe(ref)
        return event if event is not None and event.kind is NodeEventKind.GONE else None

    try:
        await backend.create(node)
        event = await eventually(gone, what="its end")
        assert "it could not start: RuntimeError: the job's code is not in Ray's tables" in event.reason
        await backend.delete(ref)
    finally:
        await backend.close()


@pytest.mark.parametrize(
    ("differs", "both"),
    [
        ("ray.__version__ = '2.9.0'", r"Ray: 2\.60\.0.*Ray: 2\.9\.0"),
        (
            "ray._private.utils.compute_version_info = lambda: (ray.__version__, '3.9.1')",
            r"Python: 3\.11\.\d+.*Python: 3\.9\.1",
        ),
    ],
)
async def test_ray_or_python_of_another_version_is_refused_with_both(
    cluster: RayCluster, tmp_path: Path, differs: str, both: str
):
    await cluster.start(machines=0)
    other = tmp_path / "python"
    code = (
        f"import ray, ray._private.utils, runpy, sys; {differs}; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    other.write_text(f'#!/bin/sh\nshift\nexec {interpreter()} -P -c "{code}" "$@"\n')
    other.chmod(0o755)
    backend = RayBackend(RaySettings(address=cluster.address, python=str(other)))
    with pytest.raises(NodeRefused, match=f"{both}.*set PERDURE_RAY_PYTHON"):
        await backend.create(request())
    await backend.close()
