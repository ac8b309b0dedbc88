"""Tests of complete jobs on a cluster with faults. Their pods fit no machine, because no test needs a running pod."""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from typing import Any

import pytest

from perdure.activities.nodes.kubernetes.leftovers import Leftover, find_leftovers, keep_tidy
from perdure.client.client import Client
from perdure.contract import CreatedNode, JobPhase
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure
from tests.support.waiting import eventually

pytestmark = pytest.mark.long("cluster-faults")

JOBS_AT_ONCE = 16


def job_that_fits_nowhere(job: PodJob, name: str, nodes: int = 1) -> dict[str, Any]:
    role = {"nodes": nodes, "image": "localhost/none", "command": ["torchrun", "t.py"], "resources": {"cpu": 1000}}
    return {"name": name, "namespace": job.namespace, "backend": "kubernetes", "roles": {"worker": role}}


async def test_a_pod_that_is_gone_before_its_job_knows_of_it_is_made_again(cluster: TestCluster, job: PodJob) -> None:
    gone: list[str] = []

    async def vanish(created: CreatedNode) -> None:
        # Not the first one: whether its group's watch begins to look before or after it is a matter of luck.
        if created.name.endswith("2") and not gone:
            gone.append(created.name)
            await job.api.delete(f"{job.pods_path}/{created.name}", grace=0)

    async with perdure(cluster, job.namespace, made=vanish) as (_, client):
        name = await submitted(client, job)
        await job.api.delete(f"{job.pods_path}/{await made(job, name, incarnation=1)}", grace=0)
        successor = await made(job, name, incarnation=3)
        assert gone == [f"{successor[:-1]}2"]
        await cancelled(client, job, name)


async def test_a_job_outlasts_the_api_server_in_every_phase(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        await asyncio.to_thread(own_cluster.kill_api_server)
        name = await submitted(client, job)
        await asyncio.to_thread(own_cluster.start_api_server)
        first = await made(job, name, incarnation=1)

        await job.api.delete(f"{job.pods_path}/{first}", grace=0)
        await asyncio.to_thread(own_cluster.kill_api_server)
        await asyncio.to_thread(own_cluster.start_api_server)
        await made(job, name, incarnation=2)

        await asyncio.to_thread(own_cluster.kill_api_server)
        await client.cancel(name)
        await asyncio.to_thread(own_cluster.start_api_server)
        await left_nothing(client, job, name)


@pytest.mark.parametrize("end", ["cancelled", "terminated"])
async def test_a_suspended_job_that_ends_leaves_nothing(cluster: TestCluster, job: PodJob, end: str) -> None:
    async with perdure(cluster, job.namespace) as (server, client):
        name = await submitted(client, job)
        await made(job, name, incarnation=1)
        await client.suspend(name)

        async def no_pods() -> bool:
            return not await job.pods()

        await eventually(no_pods)
        assert await job.api.list(job.anchors_path, labels=f"perdure.dev/job={name}")
        if end == "cancelled":
            await cancelled(client, job, name)
        else:
            await (await server.client()).get_workflow_handle(f"job/{job.namespace}/{name}").terminate()
            await eventually(job.nothing_left)


async def test_what_no_workflow_is_left_to_remove_is_found_and_swept(cluster: TestCluster, job: PodJob) -> None:
    async with perdure(cluster, job.namespace) as (server, client):
        temporal = await server.client()
        name = await submitted(client, job)
        await made(job, name, incarnation=1)
        [group] = (await client.status(name)).groups
        assert await find_leftovers(job.api, temporal, young=timedelta()) == []
        await temporal.get_workflow_handle(f"job/{job.namespace}/{name}").terminate()
        await temporal.get_workflow_handle(group).terminate()

        async def found() -> list[Leftover]:
            return await find_leftovers(job.api, temporal, young=timedelta())

        [leftover] = await eventually(found)
        assert (leftover.namespace, leftover.job_id) == (job.namespace, f"job/{job.namespace}/{name}")
        assert await find_leftovers(job.api, temporal) == [], "it may be a group that has just begun"
        sweeping = asyncio.create_task(keep_tidy(job.api, temporal, young=timedelta()))
        await eventually(job.nothing_left)
        sweeping.cancel()


async def test_many_jobs_at_once_do_not_meet(cluster: TestCluster, job: PodJob) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        names = await asyncio.gather(*(submitted(client, job, nodes=2) for _ in range(JOBS_AT_ONCE)))

        async def all_made() -> bool:
            return len(await job.pods()) == 2 * JOBS_AT_ONCE

        await eventually(all_made)
        pods = {pod["metadata"]["labels"]["perdure.dev/job"] for pod in await job.pods()}
        assert pods == set(names)
        assert len(await job.api.list(job.anchors_path, labels="app.kubernetes.io/managed-by=perdure")) == JOBS_AT_ONCE
        await asyncio.gather(*(cancelled(client, job, name) for name in names))
        assert await job.pods() == []


async def submitted(client: Client, job: PodJob, *, nodes: int = 1) -> str:
    name = f"k-{secrets.token_hex(4)}"
    await client.submit(job_that_fits_nowhere(job, name, nodes))
    return name


async def made(job: PodJob, name: str, *, incarnation: int) -> str:
    """The pod of a job's only node, once there is one of this incarnation."""
    labels = f"perdure.dev/job={name},perdure.dev/incarnation={incarnation}"

    async def found() -> list[Any]:
        return await job.api.list(job.pods_path, labels=labels)

    (pod,) = await eventually(found)
    return pod["metadata"]["name"]


async def cancelled(client: Client, job: PodJob, name: str) -> None:
    await client.cancel(name)
    await left_nothing(client, job, name)


async def left_nothing(client: Client, job: PodJob, name: str) -> None:
    """The job has been cancelled, and nothing of it is there any more."""
    assert (await client.wait(name)).phase is JobPhase.CANCELLED

    async def nothing_left() -> bool:
        labels = f"perdure.dev/job={name}"
        return not await job.api.list(job.pods_path, labels=labels) and not await job.api.list(
            job.anchors_path, labels=labels
        )

    await eventually(nothing_left)
