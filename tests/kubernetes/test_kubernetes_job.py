"""Tests of a complete job on real nodes: real pods, real agents in them, real torchrun ranks over gloo."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.pod import JOB
from perdure.contract import EvidenceSource, FailureClass, JobPhase
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually
from tests.system.site import SCRIPT


def one_pod_per_machine(job: str) -> dict[str, Any]:
    """The scheduler spreads pods by itself, but not always."""
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {JOB: job}},
    }
    return {"spec": {"topologySpreadConstraints": [spread]}}


async def test_a_pod_deleted_under_training_is_replaced_and_all_step_again(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path
) -> None:
    name = f"k-{secrets.token_hex(4)}"
    async with perdure(cluster, job.namespace) as (_, client):
        worker = {
            "nodes": 2,
            "image": BARE_IMAGE,
            "command": ["torchrun", str(SCRIPT), str(results)],
            "pod_template": merge(with_host_programs(results), one_pod_per_machine(name)),
        }
        training = await start(client, worker, results, name=name, limits={"termination_grace_period": "5s"})
        await training.running(nodes=2)
        pods = {pod["spec"]["nodeName"]: pod["status"]["podIP"] for pod in await job.pods()}
        addresses = {node.address for node in await client.nodes(name)}
        assert addresses == set(pods.values())
        # So the ranks have met across two nodes.
        assert set(pods) == {"real-0", "real-1"}

        [victim] = [pod["metadata"]["name"] for pod in await job.pods() if "-worker-1-" in pod["metadata"]["name"]]
        await job.api.delete(f"{job.pods_path}/{victim}")
        status = await training.running(nodes=2, after=1)
        await training.stepping(generation=status.generation, ranks=2)
        assert sorted((node.rank, node.incarnation) for node in await client.nodes(name)) == [(0, 1), (1, 2)]
        incident = (await training.incidents())[0]
        assert (incident.failure, incident.culprit) == (FailureClass.DISRUPTED, 1)
        # On a busy machine its kubelet is slower to report it than the job waits for the reason.
        said = {(EvidenceSource.BACKEND, "deleted"), (EvidenceSource.AGENT, "the launcher received SIGTERM")}
        assert any(sign.source is source and text in sign.text for sign in incident.evidence for source, text in said)

        await client.cancel(name)
        result = await client.wait(name)
        assert result.phase is JobPhase.CANCELLED
        await eventually(job.nothing_left)


async def test_a_command_that_needs_more_memory_than_its_container_has_is_told_the_limit(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        greedy = role(command=["python3", "-c", "bytearray(900 << 20)"], resources={"memory": "300Mi"})
        failing = await start(client, greedy, tmp_path, retry={"no_progress_limit": 1})
        result = await client.wait(failing.name)
        assert (result.phase, result.exit_code) == (JobPhase.FAILED, 1)
        assert "SIGKILL: the kernel killed it because its container's memory ran out; the limit is 300 MiB" in (
            result.reason
        )
        assert (await failing.incidents())[-1].failure is FailureClass.OUT_OF_MEMORY
