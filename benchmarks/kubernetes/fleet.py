"""A thousand pods on machines that exist only in the API: KWOK simulates their kubelets, and their pods run at once.

Nothing runs in such a pod, so its agent is simulated as well (`agents.py`), with the configuration of a real one. Job,
backend, API server, scheduler, Temporal server and worker are real.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from perdure.activities.nodes.kubernetes.pod import pod_of
from perdure.activities.nodes.kubernetes.settings import KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.base.kubernetes import Object
from perdure.contract import NodeCredentials, NodeRequest
from perdure.contract.names import node_name
from perdure.spec.job import JobSpec

from .records import Posted
from .site import KWOK, POLICY, BenchmarkApi, Site, eventually

ROLE = "worker"
AT_ONCE = KubernetesSettings(agent_image="").creates_at_once
LOOK_SECONDS = 600.0
PODS_EACH = 8
"""Pods per simulated machine. Each machine renews its lease every ten seconds, and the API server runs on this one."""

SPARE_MACHINES = 8
"""Additional machines for replacements, which start before the pods that they replace are gone."""


@asynccontextmanager
async def played_machines(api: BenchmarkApi, pods: int) -> AsyncGenerator[None]:
    """Creates simulated machines for this many pods, tainted against all other pods."""
    nodes = "/api/v1/nodes"
    count = -(-pods // PODS_EACH) + SPARE_MACHINES
    try:
        await at_once(api.create(nodes, _machine(number)) for number in range(count))
        yield
    finally:
        await at_once(api.delete(f"{nodes}/{_machine_name(number)}") for number in range(count))


def large_job(name: str, namespace: str, nodes: int) -> dict[str, Any]:
    """Returns a job whose pods are scheduled to simulated machines."""
    return {
        "name": name,
        "namespace": namespace,
        "backend": "kubernetes",
        "limits": {"termination_grace_period": "1s"},
        "roles": {
            ROLE: {
                "nodes": {"min": nodes * 9 // 10, "max": nodes},
                "nproc_per_node": 8,
                "image": "registry.example/acme/train:1",
                "command": ["torchrun", "train.py"],
                "resources": {"cpu": 16, "memory": "64Gi"},
                "tolerations": [{"key": KWOK, "operator": "Exists"}],
                "pod_template": {"spec": {"nodeSelector": {"type": "kwok"}}},
            }
        },
    }


async def post_job(site: Site, name: str, nodes: int) -> Posted:
    """Measures the time from the submission of a job until all its pods run."""
    began = time.monotonic()
    watched = asyncio.create_task(_posted(site, nodes, began))
    await site.client.submit(large_job(name, site.namespace, nodes))
    return await watched


async def post_bare(site: Site, nodes: int) -> Posted:
    """Measures the same for a loop that only creates the same pods, and deletes them."""
    settings = KubernetesSettings(
        agent_image=site.pods.agent_image,
        connection={"TEMPORAL_ADDRESS": site.address},
        policy=SitePolicy.parse(POLICY),
    )
    spec = JobSpec.model_validate(large_job("bare", site.namespace, nodes))
    pods = [pod_of(_request(spec, rank), settings) for rank in range(nodes)]
    began = time.monotonic()
    watched = asyncio.create_task(_posted(site, nodes, began))
    await at_once(site.api.create(site.pods_path, pod) for pod in pods)
    posted = await watched
    await site.clear()
    return posted


async def _posted(site: Site, nodes: int, began: float) -> Posted:
    async def requested() -> bool:
        return await site.pod_count() >= nodes

    async def running() -> bool:
        return not await site.api.count(site.pods_path, fields="status.phase!=Running")

    await eventually(requested, seconds=LOOK_SECONDS, otherwise=f"{nodes} pods were not made")
    requested_after = time.monotonic() - began
    await eventually(running, seconds=LOOK_SECONDS, otherwise=f"{nodes} pods do not run")
    return Posted(nodes=nodes, requested=requested_after, running=time.monotonic() - began)


async def at_once(calls: Iterable[Awaitable[Any]]) -> None:
    """Makes calls with the backend's own parallelism."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[Any]) -> None:
        async with slots:
            await call

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(one(call))


def _request(spec: JobSpec, rank: int) -> NodeRequest:
    uid, token = "ba5e0000", secrets.token_hex(16)
    node = NodeCredentials(uid=uid, role=ROLE, rank=rank, incarnation=1, token=token)
    return NodeRequest(
        node=node,
        name=node_name(spec.name, node),
        spec=spec,
        job_id=f"job/{spec.namespace}/{spec.name}",
        job_first_run_id="none",
        group_id=f"job/{spec.namespace}/{spec.name}/{uid}/{ROLE}/0",
        task_queue=f"node/{uid}/{ROLE}-{rank}/1",
    )


def _machine_name(number: int) -> str:
    return f"played-{number}"


def _machine(number: int) -> Object:
    name = _machine_name(number)
    # A little more than the training in this many pods requests, because each has a sidecar.
    capacity = {"cpu": str(17 * PODS_EACH), "memory": f"{65 * PODS_EACH}Gi", "pods": str(2 * PODS_EACH)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {KWOK: "fake"},
            "labels": {"type": "kwok", "kubernetes.io/hostname": name},
        },
        "spec": {"taints": [{"key": KWOK, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": capacity, "capacity": capacity, "phase": "Running"},
    }
