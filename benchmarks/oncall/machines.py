"""Events of machines: those that leave, are closed to pods, or take none although the scheduler says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from scripts.cluster.images import BARE_IMAGE

from .objects import thing, until_ready
from .scene import Event, Scene

SCHEDULER = "oncall"
"""A scheduler that does not exist: the event binds its pods by itself."""


async def spot_notice(scene: Scene) -> None:
    await scene.train()
    machine = await scene.machine()
    await scene.strike()
    async with _tainted(scene, machine, "spot.example/interruption", "NoExecute"):
        await scene.repaired()


async def scaled_down(scene: Scene) -> None:
    await scene.train()
    machine = await scene.machine()
    (node,) = (node for node in scene.site.cluster.nodes() if node.name == machine)
    await scene.strike()
    async with _tainted(scene, machine, "ToBeDeletedByClusterAutoscaler", "NoSchedule"):
        await scene.evict()
        await scene.repaired()
    repaired = scene.seconds
    await asyncio.to_thread(node.kill_kubelet)
    try:
        await scene.site.api.delete(f"/api/v1/nodes/{machine}")
        await scene.strike()
        await asyncio.sleep(10)
        await scene.undisturbed(10)
    finally:
        await asyncio.to_thread(node.start_kubelet)
        await until_ready(scene.site, machine)
    scene.seconds = repaired


async def all_cordoned(scene: Scene) -> None:
    await scene.train()
    machines = [node.name for node in scene.site.cluster.nodes()]
    await _cordon(scene, machines, closed=True)
    try:
        await scene.delete_pod()
        await scene.waits_for("unschedulable")
    finally:
        await _cordon(scene, machines, closed=False)
    await scene.strike()
    await scene.stepping(2)


async def kubelet_rejects(scene: Scene) -> None:
    first, second = (node.name for node in scene.site.cluster.nodes())
    whole = await _memory(scene, second)
    filler = thing("v1", "Pod", "filler")
    filler["spec"] = {
        "nodeSelector": {"kubernetes.io/hostname": second},
        "containers": [
            {
                "name": "filler",
                "image": BARE_IMAGE,
                "command": ["sleep", "600"],
                "resources": {"requests": {"memory": str(whole - 2**30)}},
            }
        ],
        "terminationGracePeriodSeconds": 1,
    }
    unmake = await scene.make("pods", filler)
    await scene.submit(role={"pod_spec": {"schedulerName": SCHEDULER}})
    await _bind(scene, await scene.pod(0), first)
    rejected = await scene.pod(1)
    await _bind(scene, rejected, second)
    await scene.strike()
    replacement = await scene.newer_pod(rejected)
    await _bind(scene, replacement, first)
    await scene.stepping(2)
    await unmake()


async def _bind(scene: Scene, pod: dict[str, Any], machine: str) -> None:
    name = pod["metadata"]["name"]
    binding = thing("v1", "Binding", name) | {"target": {"apiVersion": "v1", "kind": "Node", "name": machine}}
    await scene.site.api.create(f"{scene.path('pods')}/{name}/binding", binding)


async def _memory(scene: Scene, machine: str) -> int:
    node = await scene.site.api.get(f"/api/v1/nodes/{machine}")
    assert node is not None
    return int(node["status"]["allocatable"]["memory"].removesuffix("Ki")) * 1024


async def _cordon(scene: Scene, machines: list[str], *, closed: bool) -> None:
    for machine in machines:
        await scene.site.api.set_spec(f"/api/v1/nodes/{machine}", unschedulable=closed)


@asynccontextmanager
async def _tainted(scene: Scene, machine: str, key: str, effect: str) -> AsyncGenerator[None]:
    await scene.kubectl(f"taint nodes {machine} {key}=true:{effect}")
    try:
        yield
    finally:
        await scene.kubectl(f"taint nodes {machine} {key}-")


MACHINES = (
    Event("spot notice: its machine is tainted NoExecute", "both nodes step again", spot_notice, says="taints"),
    Event("autoscaler removes a machine", "both nodes step again", scaled_down, says="evicted"),
    Event("all machines cordoned; a pod is deleted", "says so; both nodes step again", all_cordoned),
    Event("a kubelet rejects a pod for lack of memory", "starts on another machine", kubelet_rejects),
)
