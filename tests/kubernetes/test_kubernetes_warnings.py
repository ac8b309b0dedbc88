"""Tests of pods that a real cluster cannot start, for reasons that only Events name: users read them within seconds."""

from __future__ import annotations

from pathlib import Path

from perdure.contract import JobPhase, NodePhase
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, needing, role
from tests.kubernetes.rights import chart_rights
from tests.kubernetes.site import perdure, start


async def test_a_job_whose_volume_is_missing_says_so_until_it_is_there(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob, tmp_path: Path
) -> None:
    async with (
        chart_rights(helm, own_cluster, job.api, job.namespace) as rights,
        perdure(cluster, job.namespace, kubeconfig=rights.kubeconfig("worker")) as (_, client),
    ):
        given = role(rendezvous="env", pod_template=needing("data"))
        waiting = await start(client, given, tmp_path)
        missing = 'a volume cannot be mounted (FailedMount: MountVolume.SetUp failed for volume "needed"'
        status = await waiting.until(lambda known: missing in known.next_action)
        assert 'configmap "data" not found' in status.next_action
        [view] = await client.nodes(waiting.name)
        assert (view.phase, view.reason.startswith(missing)) == (NodePhase.PENDING, True)
        await job.api.create(job.anchors_path, {"metadata": {"name": "data"}, "data": {"a": "b"}})
        await waiting.until(lambda known: known.phase is JobPhase.RUNNING, within=180)
