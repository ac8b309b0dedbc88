"""Tests of a machine that loses a job's nodes repeatedly: the next node is requested elsewhere."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from perdure.activities.nodes.containers import SHARED
from perdure.contract import JobPhase
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure
from tests.system.site import Job

pytestmark = pytest.mark.long("cluster-faults")


async def test_after_two_losses_that_nothing_explains_a_node_goes_to_another_machine(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    name = f"k-{secrets.token_hex(4)}"
    first = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["real-0"]}
    preference = {"weight": 20, "preference": {"matchExpressions": [first]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}
    command = ["sleep", "600"]
    async with perdure(cluster, job.namespace) as (_, client):
        await client.submit(
            {
                "name": name,
                "namespace": job.namespace,
                "backend": "kubernetes",
                "limits": {"termination_grace_period": "1s"},
                "roles": {
                    "worker": role(rendezvous="env", command=command, pod_template={"spec": {"affinity": affinity}})
                },
            }
        )
        running = Job(client, name, (await client.status(name)).uid, tmp_path)
        hosts: list[str] = []
        for generation in (1, 2, 3):
            await running.until(lambda s, at=generation: s.phase is JobPhase.RUNNING and s.generation == at)
            [node] = await client.nodes(name)
            hosts.append(node.host)
            if generation < 3:
                [launcher] = [one for one in running.processes(0) if f"{SHARED}/lib" in one.cmdline()]
                launcher.kill()
        assert hosts == ["real-0", "real-0", "real-1"]
        assert node.avoids == ("real-0",)
        assert [incident.avoided for incident in await client.incidents(name)] == [(), ("real-0",)]
        await client.cancel(name)
        assert (await client.wait(name)).phase is JobPhase.CANCELLED
