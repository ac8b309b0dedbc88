"""Somebody deletes the whole job in the cluster: it ends with that reason, and nothing is made again."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, eventually, role
from tests.kubernetes.site import perdure
from tests.system.site import Job
from workflows.messages import JobPhase


@pytest.mark.parametrize("deleted", ["anchor", "namespace"])
async def test_a_job_whose_anchor_or_namespace_is_deleted_is_cancelled(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path, deleted: str
) -> None:
    name = f"k-{secrets.token_hex(4)}"
    async with perdure(cluster, job.namespace) as (_, client):
        await client.submit(
            {
                "name": name,
                "namespace": job.namespace,
                "backend": "kubernetes",
                "limits": {"termination_grace_period": "2s"},
                "roles": {"worker": role(nodes=2, rendezvous="env", command=["sleep", "600"])},
            }
        )
        uid = (await client.status(name)).uid
        await Job(client, name, uid, tmp_path).running(nodes=2)
        if deleted == "anchor":
            await job.api.delete(f"{job.anchors_path}/perdure-{name}-{uid}")
            reason = f"cancelled: its ConfigMap perdure-{name}-{uid} was deleted in the cluster"
        else:
            await job.api.delete(f"/api/v1/namespaces/{job.namespace}")
            reason = f"cancelled: its namespace {job.namespace} is being deleted"
        result = await client.wait(name)
        assert (result.phase, result.exit_code, result.reason) == (JobPhase.CANCELLED, 4, reason)
        assert {node.incarnation for node in await client.nodes(name)} == {1}

        async def nothing_left() -> bool:
            anchors = await job.api.list(job.anchors_path, labels="app.kubernetes.io/managed-by=perdure")
            return not anchors and not await job.pods()

        await eventually(nothing_left)
