"""The watch over a large cluster: machines and pods that exist only in a real API server, as users read its view.

The watching worker is a process of its own. Every machine changes in turn; then single ones come, and the time
counts until `perdure cluster` would show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import psutil
from temporalio.client import WorkflowContinuedAsNewError

from benchmarks.recovery.perdure_job import control_plane
from perdure.base.errors import NoWorker
from perdure.base.kubernetes import KubernetesApi, Object
from perdure.client.client import Client
from perdure.client.cluster import read_clusters
from perdure.contract import ClusterView
from perdure.contract.names import cluster_workflow_id
from perdure.spec.job import Backend
from scripts.cluster.cluster import Cluster, why_not

NODES = "/api/v1/nodes"
KEYS = ("monitor_rss_mb", "monitor_view_age_s", "monitor_events_per_s")
_AT_ONCE = 32
_PATIENCE = 300.0
_LOOKS = 5
"""Machines that come one by one."""
_FAKE = "kwok.x-k8s.io/node"
"""KWOK keeps machines with this annotation ready."""


async def measure(machines: int, say: Callable[[str], None], *, label_bytes: int = 0) -> dict[str, float | str]:
    """Measures the watch over so many machines, with labels of so many bytes, and a pod on every second one."""
    if reason := why_not():
        say(f"no cluster can run here: {reason}")
        return dict.fromkeys(KEYS, "not run")
    with Cluster().use(say) as cluster:
        kubeconfig = str(cluster.kubeconfig)
        before = os.environ.get("KUBECONFIG")
        os.environ["KUBECONFIG"] = kubeconfig
        api = await KubernetesApi.connect(kubeconfig)
        try:
            async with _made(api, machines, label_bytes, say) as names, control_plane(worker_module=_WORKER) as plane:
                process = plane.worker.process
                assert process is not None
                return await _watch(api, plane.client, names, process, say)
        finally:
            await api.close()
            os.environ.pop("KUBECONFIG")
            if before is not None:
                os.environ["KUBECONFIG"] = before


_WORKER = "benchmarks.scaling.watching_worker"


async def _watch(
    api: KubernetesApi, client: Client, names: list[str], process: psutil.Process, say: Callable[[str], None]
) -> dict[str, float | str]:
    began = time.monotonic()
    await _until(client, lambda view: view.machines_total >= len(names))
    say(f"{len(names)} machines are in the view after {time.monotonic() - began:.1f} s")
    known = (await _view(client)).events
    began = time.monotonic()
    await _at_once(_patch(api, name, {"metadata": {"labels": {"bench": "changed"}}}) for name in names)
    changed = time.monotonic()
    await _until(client, lambda view: view.events >= known + len(names))
    rate = len(names) / (time.monotonic() - began)
    say(
        f"all machines changed in {changed - began:.1f} s of requests: {rate:,.0f} events per second until the view "
        f"has all, {_since(changed)} after the last one"
    )
    ages: list[float] = []
    for _ in range(_LOOKS):
        known = (await _view(client)).machines_total
        began = time.monotonic()
        names.append(f"{names[0]}-{len(names)}")
        await api.create(NODES, _machine(names[-1]))
        await _until(client, lambda view, known=known: view.machines_total > known)
        ages.append(time.monotonic() - began)
    say(f"a new machine is counted after {', '.join(f'{age:.1f} s' for age in ages)}")
    await _continue(client, len(names), say)
    return {
        "monitor_rss_mb": round(process.memory_info().rss / 2**20, 1),
        "monitor_view_age_s": round(median(ages), 2),
        "monitor_events_per_s": round(rate, 1),
    }


async def _continue(client: Client, machines: int, say: Callable[[str], None]) -> None:
    """Has the workflow continue as new, as it does by itself when its history is long, and waits for the whole view."""
    temporal = await client.connect()
    handle = temporal.get_workflow_handle(cluster_workflow_id(client.endpoint.task_queue, Backend.KUBERNETES))
    before = await handle.describe()
    pending = before.raw_description.pending_activities[0].activity_id
    began = time.monotonic()
    await temporal.get_async_activity_handle(
        workflow_id=before.id, run_id=before.run_id, activity_id=pending
    ).complete()
    first = temporal.get_workflow_handle(before.id, run_id=before.run_id)
    with contextlib.suppress(WorkflowContinuedAsNewError):
        await first.result(follow_runs=False)
    await _until(client, lambda view: view.machines_total >= machines)
    events = before.history_length
    say(f"continued as new after {events} events; all machines are in the view again after {_since(began)}")


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.1f} s"


@asynccontextmanager
async def _made(
    api: KubernetesApi, machines: int, label_bytes: int, say: Callable[[str], None]
) -> AsyncGenerator[list[str]]:
    label = f"bench-{secrets.token_hex(3)}"
    names = [f"{label}-{number}" for number in range(machines)]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": label}}
    began = time.monotonic()
    await api.create("/api/v1/namespaces", namespace)
    try:
        await _at_once(api.create_or_get(NODES, _machine(name, label_bytes)) for name in names)
        pods = f"/api/v1/namespaces/{label}/pods"
        await _at_once(api.create_or_get(pods, _pod(name)) for name in names[::2])
        say(f"{machines} machines and {len(names[::2])} pods made in {time.monotonic() - began:.1f} s")
        yield names
    finally:
        await api.delete(f"/api/v1/namespaces/{label}")
        await _at_once(api.delete(f"{NODES}/{name}") for name in names)


def _machine(name: str, label_bytes: int = 0) -> Object:
    labels = {f"bench-{number}": f"{name}-{number}".ljust(63, "x")[:63] for number in range(label_bytes // 72)}
    capacity = {"cpu": "96", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {_FAKE: "fake"}, "labels": labels | {"type": "kwok"}},
        "spec": {"taints": [{"key": _FAKE, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": capacity, "capacity": capacity, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def _pod(machine: str) -> Object:
    requests = {"cpu": "90", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": machine},
        "spec": {
            "nodeName": machine,
            "automountServiceAccountToken": False,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "main", "image": "made/up:1", "resources": {"limits": requests}}],
        },
    }


async def _patch(api: KubernetesApi, name: str, content: Object) -> None:
    await api.patch(f"{NODES}/{name}", content)


async def _at_once(calls: Iterable[Awaitable[Any]]) -> None:
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Awaitable[Any]) -> None:
        async with slots:
            await call

    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(one(call))


async def _view(client: Client) -> ClusterView:
    [view] = await read_clusters(client, [Backend.KUBERNETES])
    return view


async def _until(client: Client, is_so: Callable[[ClusterView], bool]) -> None:
    async with asyncio.timeout(_PATIENCE):
        while True:
            try:
                if is_so(await _view(client)):
                    return
            except NoWorker:
                pass
            await asyncio.sleep(0.1)
