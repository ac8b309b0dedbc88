"""Runs the demo's nodes as pods of a real cluster on this machine: API server, scheduler, two kubelets."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from examples.demo.places import NAME, OUT, ROLE, SCRIPT, Place, ended
from perdure.base.kubernetes import KubernetesApi
from perdure.base.state_folder import StateFolder
from perdure.contract import NodeId
from perdure.contract.names import node_name
from perdure.local.control_plane import LocalControlPlane, PodSite, Report
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY, with_host_programs
from scripts.cluster.images import BARE_IMAGE
from scripts.cluster.machine import API_ADDRESS

PODS = "/api/v1/namespaces/default/pods"


class Pods:
    """Runs each node as a pod. Its training container has a shell, and this machine's Python and torch."""

    node_fault = "kubectl delete pod"

    def __init__(self, control_plane: LocalControlPlane, api: KubernetesApi, out: Path) -> None:
        self.control_plane = control_plane
        self._api = api
        self._out = out

    def job(self, arguments: list[str]) -> dict[str, Any]:
        role = {
            "command": ["torchrun", str(SCRIPT), *arguments],
            "image": BARE_IMAGE,
            "pod_template": with_host_programs(self._out),
        }
        return {"backend": "kubernetes", "limits": {"termination_grace_period": "5s"}, "roles": {ROLE: role}}

    async def lose_node(self, uid: str, rank: int) -> None:
        node = NodeId(uid=uid, role=ROLE, rank=rank, incarnation=1)
        await self._api.delete(f"{PODS}/{node_name(NAME, node)}")


@asynccontextmanager
async def plane_on_pods(folder: Path, report: Report) -> AsyncGenerator[tuple[LocalControlPlane, KubernetesApi]]:
    """Provides a server and a worker whose nodes are pods of the machine's cluster, and the cluster's API, and ends
    them. Starts the cluster if it does not run, and then ends it, too."""
    with Cluster().use(report) as cluster:
        report("Building an image of this checkout")
        policy = folder / "site-policy.yaml"
        policy.write_text(SITE_POLICY)
        site = PodSite(
            kubeconfig=cluster.kubeconfig,
            agent_image=cluster.load_perdure_image().reference,
            site_policy=policy,
            ip=API_ADDRESS,
        )
        plane = LocalControlPlane(StateFolder(folder / "state"), report=report, pods=site)
        api = await KubernetesApi.connect(str(cluster.kubeconfig))
        try:
            async with ended(plane):
                yield plane, api
        finally:
            await api.close()


@asynccontextmanager
async def pods(folder: Path, report: Report) -> AsyncGenerator[Place]:
    """Provides the machine's cluster, a server and a worker, and ends those that it started."""
    (folder / OUT).mkdir()
    async with plane_on_pods(folder, report) as (plane, api):
        yield Pods(plane, api, folder / OUT)
