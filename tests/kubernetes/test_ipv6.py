"""Tests of pods whose own addresses are of IPv6, on a real machine of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.nodes.kubernetes.merge import merge
from perdure.base.kubernetes import KubernetesApi
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from scripts.cluster.machine import IPV6_ADDRESS, has_ipv6
from scripts.cluster.node import Node
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure, start
from tests.kubernetes.test_kubernetes_adversity import has_condition
from tests.support.waiting import eventually
from tests.system.site import SCRIPT

pytestmark = [
    pytest.mark.long("cluster-faults"),
    pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"),
]


@asynccontextmanager
async def ipv6_first(machine: Node, api: KubernetesApi) -> AsyncIterator[None]:
    """Pods that start on the machine have addresses of both families, that of IPv6 first."""

    async def restart(*, ipv6_first: bool) -> None:
        await asyncio.to_thread(machine.kill_kubelet)
        await asyncio.to_thread(machine.start_kubelet, ipv6_first=ipv6_first)

        async def has_addresses() -> bool:
            node = await api.get(f"/api/v1/nodes/{machine.name}")
            assert node
            (first, *_) = [one["address"] for one in node["status"]["addresses"] if one["type"] == "InternalIP"]
            return (":" in first) is ipv6_first and await has_condition(api, machine, "Ready", "True")

        await eventually(has_addresses)

    try:
        await restart(ipv6_first=True)
        yield
    finally:
        await restart(ipv6_first=False)


async def test_nodes_with_addresses_of_ipv6_train_reach_temporal_and_are_replaced(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path
) -> None:
    machine = own_cluster.nodes()[-1]
    onto: dict[str, Any] = {"spec": {"nodeSelector": {"kubernetes.io/hostname": machine.name}}}
    worker = {
        "nodes": 2,
        "image": BARE_IMAGE,
        "command": ["torchrun", str(SCRIPT), str(results)],
        "pod_template": merge(with_host_programs(results), onto),
    }
    async with (
        ipv6_first(machine, job.api),
        perdure(cluster, job.namespace, address=f"[{IPV6_ADDRESS}]", listen="::") as (_, client),
    ):
        training = await start(client, worker, results)
        before = await training.running(nodes=2)
        await training.stepping(generation=before.generation, ranks=2)
        for pod in await job.pods():
            assert IPv6Address(pod["status"]["podIP"])
        [victim] = [pod["metadata"]["name"] for pod in await job.pods() if "-worker-1-" in pod["metadata"]["name"]]
        await job.api.delete(f"{job.pods_path}/{victim}")
        after = await training.running(nodes=2, after=before.generation)
        await training.stepping(generation=after.generation, ranks=2)
        await client.cancel(training.name)
        await client.wait(training.name)
