"""Creates real pods for tests, in namespaces of their own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.gangs import adapter_of
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.base.kubernetes import KubernetesApi
from perdure.contract import Incarnation, NodeCredentials, NodeId, NodeRef, NodeRequest, WatchRequest
from perdure.contract.names import node_name, node_task_queue
from perdure.spec.job import JobSpec
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY, with_host_programs
from scripts.cluster.images import BARE_IMAGE
from scripts.cluster.machine import API_ADDRESS
from tests.support.waiting import eventually

NOWHERE = {"TEMPORAL_ADDRESS": f"{API_ADDRESS}:9"}
"""A port where no server is: agents wait."""


@dataclass(frozen=True)
class TestCluster:
    """The cluster in which tests create pods."""

    __test__ = False

    kubeconfig: str
    agent_image: str
    own: Cluster | None
    """The machine's own cluster; None where `KUBECONFIG` names another one."""

    def backend(
        self,
        *,
        connection: dict[str, str] | None = None,
        kubeconfig: Path | None = None,
        gangs: str = "",
        policy: SitePolicy | None = None,
    ) -> KubernetesBackend:
        settings = KubernetesSettings(
            agent_image=self.agent_image,
            connection=connection or NOWHERE,
            gangs=adapter_of(gangs),
            policy=policy or SitePolicy.parse(SITE_POLICY),
        )
        return KubernetesBackend(settings, kubeconfig=str(kubeconfig or self.kubeconfig))


def role(*writable: Path, pod_template: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A role whose command starts without a world and sleeps, in a container with this machine's Python."""
    return {
        "nodes": 1,
        "rendezvous": "torchrun",
        "nproc_per_node": 1,
        "image": BARE_IMAGE,
        "command": ["sleep", "600"],
        "pod_template": merge(with_host_programs(*writable), pod_template or {}),
        **fields,
    }


def needing(config_map: str) -> dict[str, Any]:
    """A template whose training container does not start before this ConfigMap exists."""
    mount = {"name": "training", "volumeMounts": [{"name": "needed", "mountPath": "/needed"}]}
    return {"spec": {"containers": [mount], "volumes": [{"name": "needed", "configMap": {"name": config_map}}]}}


def marking(marks: Path, **fields: Any) -> dict[str, Any]:
    """A role whose command leaves a mark that `PodJob.command_started` looks for."""
    return role(marks, command=["sh", "-c", f"touch {marks}/$HOSTNAME; exec sleep 600"], **fields)


class PodJob:
    """Requests for the nodes of one made-up job."""

    def __init__(
        self,
        api: KubernetesApi,
        namespace: str,
        given: dict[str, Any] | None = None,
        *,
        marks: Path | None = None,
        **spec: Any,
    ) -> None:
        """A job in a namespace.

        Args:
            api: of the cluster.
            namespace: that exists.
            given: the role; by default one whose command, if it may, leaves a mark and sleeps.
            marks: where a command says that it has started.
            spec: other fields.
        """
        self.api = api
        self.namespace = namespace
        self.marks = marks
        if given is None and marks is not None:
            given = marking(marks)
        self.uid = secrets.token_hex(4)
        self.spec = JobSpec.model_validate(
            {
                "name": "made-up",
                "namespace": namespace,
                "backend": "kubernetes",
                "limits": {"termination_grace_period": "2s"},
                "timing": {"processes": {"stop_grace": "500ms"}},
                **spec,
                "roles": {"worker": given or role()},
            }
        )
        self.group_id = f"job/{namespace}/made-up/{self.uid}/worker/0"

    def changed(self, given: dict[str, Any] | None = None, **spec: Any) -> PodJob:
        """Another job in the same namespace."""
        return PodJob(self.api, self.namespace, given, marks=self.marks, **spec)

    async def command_started(self, rank: int = 0) -> None:
        """The launcher has started the command of `marking`, and hears signals."""
        assert self.marks
        mark = self.marks / self.name(rank)

        async def exists() -> bool:
            return mark.exists()

        await eventually(exists)

    async def allow_no_pods(self) -> None:
        """Gives the namespace a quota, named `none`, that is used up."""
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
        path = f"/api/v1/namespaces/{self.namespace}/resourcequotas"
        await self.api.create(path, quota | {"spec": {"hard": {"pods": "0"}}})

        async def counted() -> bool:
            found = await self.api.get(f"{path}/none")
            return bool(found and found.get("status", {}).get("hard"))

        await eventually(counted)

    def request(self, rank: int = 0, incarnation: int = 1) -> NodeRequest:
        return NodeRequest(
            node=NodeCredentials(uid=self.uid, role="worker", rank=rank, incarnation=incarnation, token="t" * 16),
            name=self.name(rank, incarnation),
            spec=self.spec,
            job_id=f"job/{self.namespace}/made-up",
            job_first_run_id="no-run",
            group_id=self.group_id,
            task_queue=node_task_queue(self.id(rank, incarnation)),
        )

    def id(self, rank: int = 0, incarnation: int = 1) -> NodeId:
        return NodeId(uid=self.uid, role="worker", rank=rank, incarnation=incarnation)

    def name(self, rank: int = 0, incarnation: int = 1) -> str:
        return node_name(self.spec.name, self.id(rank, incarnation))

    def ref(
        self,
        rank: int = 0,
        incarnation: int = 1,
        *,
        grace: float = 2.0,
        winding_down: bool = False,
        replaced: bool = False,
    ) -> NodeRef:
        return NodeRef(
            name=self.name(rank, incarnation),
            uid=self.uid,
            role="worker",
            rank=rank,
            incarnation=incarnation,
            backend="kubernetes",
            namespace=self.namespace,
            grace=timedelta(seconds=grace),
            winding_down=winding_down,
            replaced=replaced,
        )

    def watch(self, *, group: int = 0, known: Iterable[tuple[int, int]] = ()) -> WatchRequest:
        return WatchRequest(
            group_id=self.group_id,
            job_id=f"job/{self.namespace}/made-up",
            job_first_run_id="no-run",
            uid=self.uid,
            role="worker",
            group=group,
            backend="kubernetes",
            namespace=self.namespace,
            owner_check=timedelta(seconds=10),
            known=tuple(Incarnation(rank=rank, incarnation=incarnation) for rank, incarnation in known),
        )

    async def pod(self, rank: int = 0, incarnation: int = 1) -> dict[str, Any] | None:
        return await self.api.get(f"{self.pods_path}/{self.name(rank, incarnation)}")

    async def pods(self) -> list[dict[str, Any]]:
        return await self.api.list(self.pods_path)

    async def nothing_left(self) -> bool:
        """Whether the namespace has neither pods nor anchors any more, of whichever job."""
        anchors = await self.api.list(self.anchors_path, labels="app.kubernetes.io/managed-by=perdure")
        return not anchors and not await self.pods()

    @property
    def anchors_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/configmaps"

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"


@asynccontextmanager
async def job_in_a_namespace(cluster: TestCluster, marks: Path | None = None) -> AsyncIterator[PodJob]:
    """A job, and its namespace for as long as the context is open; pods are gone when it closes."""
    api = await KubernetesApi.connect(cluster.kubeconfig)
    namespace = f"test-{secrets.token_hex(4)}"
    metadata = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    try:
        await api.create("/api/v1/namespaces", metadata)
        job = PodJob(api, namespace, marks=marks)
        # Pods are refused until the controller manager has made it.
        await eventually(lambda: api.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default"))
        yield job
        for pod in await job.pods():
            await api.delete(f"{job.pods_path}/{pod['metadata']['name']}", grace=0)
    finally:
        await api.delete(f"/api/v1/namespaces/{namespace}")
        await api.close()
