"""Tests of jobs that are cancelled while a part of their Ray cluster is broken: nothing of them is left."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from perdure.contract import JobPhase
from tests.support.waiting import eventually
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import (
    ACTORS,
    asked,
    group_removed,
    nothing_is_left,
    submitted,
    trained,
    waits_for_room,
)
from tests.system.site import PATIENCE, Job, Site

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).with_name("ray_programs")
KILL_ACTORS = (
    "for one in ray.util.list_named_actors(all_namespaces=True):\n"
    "    ray.kill(ray.get_actor(one['name'], one['namespace']))\nfound = True"
)
"""Also ends those that Ray has not started."""


async def nodes_end(job: Job) -> None:
    """The nodes end by their agents, though Ray does not answer."""
    await eventually(lambda: not job.processes(), what="the end of the nodes", within=PATIENCE)


def machines_run(cluster: RayCluster) -> bool:
    """No machine has ended by itself, as Ray's machines do a minute after they have lost their head."""
    return all(cluster.raylet(machine) for machine in cluster.machines)


@asynccontextmanager
async def no_room(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    yield await waits_for_room(cluster, site)


@asynccontextmanager
async def worker_killed_before_the_actors(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    job = await waits_for_room(cluster, site)
    site.control_plane.kill_worker()
    assert await asked(cluster, KILL_ACTORS)
    yield job
    await site.control_plane.ensure()


@asynccontextmanager
async def group_removed_by_hand(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    job = await trained(cluster, site, 2)
    await group_removed(cluster)
    yield job


@asynccontextmanager
async def head_without_its_tables(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    job = await trained(cluster, site, 2)
    await cluster.start_head()
    yield job
    await nodes_end(job)


@asynccontextmanager
async def no_head(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    job = await trained(cluster, site, 2)
    await cluster.kill_head()
    yield job
    await nodes_end(job)
    assert machines_run(cluster)
    await cluster.start_head()


@asynccontextmanager
async def connection_that_hangs(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    job = await trained(cluster, site, 2)
    cluster.gcs().send_signal(signal.SIGSTOP)
    yield job
    await nodes_end(job)
    assert machines_run(cluster)
    log = site.state.path / "worker" / "worker.log"
    await eventually(lambda: "did not answer within" in log.read_text(), what="a call without an answer")
    cluster.gcs().send_signal(signal.SIGCONT)


@asynccontextmanager
async def environment_that_cannot_be_built(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    await cluster.start(machines=2)
    job = await submitted(site, ray={"runtime_env": {"working_dir": "file:///missing/code.zip"}})
    await eventually(lambda: asked(cluster, ACTORS), what="its actors")
    yield job


@asynccontextmanager
async def environment_that_is_being_built(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    plugins = json.dumps([{"class": "slow_environment.SlowEnvironment"}])
    await cluster.start(machines=0)
    for _ in range(2):
        await cluster.add(PYTHONPATH=str(PROGRAMS), RAY_RUNTIME_ENV_PLUGINS=plugins)
    begun = site.folder / "begun"
    job = await submitted(site, ray={"runtime_env": {"slow": str(begun)}})
    await eventually(begun.exists, what="the build", within=PATIENCE)
    yield job


@asynccontextmanager
async def machine_that_is_drained(cluster: RayCluster, site: Site) -> AsyncGenerator[Job]:
    job = await trained(cluster, site, 2)
    assert not await cluster.drain(cluster.machine_of(job.processes(1, kind="launcher")[0]))
    yield job


@pytest.mark.parametrize(
    "fault",
    [
        no_room,
        worker_killed_before_the_actors,
        group_removed_by_hand,
        head_without_its_tables,
        no_head,
        connection_that_hangs,
        environment_that_cannot_be_built,
        environment_that_is_being_built,
        machine_that_is_drained,
    ],
)
async def test_a_job_cancelled_meanwhile_leaves_nothing(
    cluster: RayCluster,
    ray_site: Site,
    fault: Callable[[RayCluster, Site], AbstractAsyncContextManager[Job]],
):
    async with fault(cluster, ray_site) as job:
        await ray_site.client.cancel(job.name)
    result = await ray_site.client.wait(job.name)
    assert result.phase in (JobPhase.CANCELLED, JobPhase.FAILED)
    await job.wound_down()
    await nothing_is_left(cluster, job)
