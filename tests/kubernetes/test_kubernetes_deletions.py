"""Tests of a user who deletes the whole job in the cluster: it ends with that reason, and nothing is created again."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.contract import JobPhase
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually

pytestmark = pytest.mark.long("cluster-faults")


@pytest.mark.parametrize("deleted", ["anchor", "namespace"])
async def test_a_job_whose_anchor_or_namespace_is_deleted_is_cancelled(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path, deleted: str
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        sleeping = await start(client, role(nodes=2, rendezvous="env"), tmp_path)
        await sleeping.running(nodes=2)
        anchor = f"perdure-{sleeping.name}-{sleeping.uid}"
        if deleted == "anchor":
            await job.api.delete(f"{job.anchors_path}/{anchor}")
            reason = f"cancelled: its ConfigMap {anchor} was deleted in the cluster"
        else:
            await job.api.delete(f"/api/v1/namespaces/{job.namespace}")
            reason = f"cancelled: its namespace {job.namespace} is being deleted"
        result = await client.wait(sleeping.name)
        assert (result.phase, result.exit_code, result.reason) == (JobPhase.CANCELLED, 4, reason)
        assert {node.incarnation for node in await client.nodes(sleeping.name)} == {1}
        await eventually(job.nothing_left)
