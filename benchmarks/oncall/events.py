"""The events of the day, in the words of the person on call. Each undoes what it did to the cluster."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from benchmarks.kubernetes.site import eventually
from benchmarks.recovery.processes import TrialFailed, free_port
from perdure.base.kubernetes_errors import KubernetesError
from scripts.cluster.images import BARE_IMAGE
from scripts.cluster.machine import API_ADDRESS
from scripts.cluster.node import Node

from .machines import MACHINES
from .objects import OURS, has_condition, thing
from .people import PEOPLE
from .refusals import REFUSALS
from .release import Site
from .scene import LONGEST_PAUSE, ROLE, Event, Scene

AWAY_SECONDS = 20.0
"""Seconds for which a component is away or a state lasts that must not interrupt training."""

GIBIBYTE = 2**30


async def kubelet_killed(scene: Scene) -> None:
    await scene.train()
    node = await _node(scene)
    await _undisturbed_without(scene, node.kill_kubelet, node.start_kubelet)


async def containerd_killed(scene: Scene) -> None:
    await scene.train()
    node = await _node(scene)
    await _undisturbed_without(scene, node.kill_containerd, node.start_containerd)


async def machine_not_ready(scene: Scene) -> None:
    await scene.train()
    node = await _node(scene)
    await scene.strike()
    await asyncio.to_thread(node.kill_kubelet)
    try:
        await eventually(lambda: _ready(scene.site, node.name, "Unknown"), seconds=120, otherwise="never NotReady")
        await scene.undisturbed(AWAY_SECONDS)
    finally:
        await asyncio.to_thread(node.start_kubelet)
        await eventually(lambda: _ready(scene.site, node.name, "True"), seconds=120, otherwise="not Ready again")


async def evicted_by_pressure(scene: Scene) -> None:
    await scene.train()
    node = await _node(scene)
    await asyncio.to_thread(node.kill_kubelet)
    await scene.strike()
    # The whole disk counts as pressure, whatever is on it.
    await asyncio.to_thread(lambda: node.start_kubelet(evicts_below={"nodefs.available": "99%"}))
    try:
        await _evicted(scene, node.name)
        await scene.repaired()
    finally:
        await asyncio.to_thread(node.kill_kubelet)
        await asyncio.to_thread(node.start_kubelet)
        await eventually(
            lambda: has_condition(scene.site, node.name, "DiskPressure", "False"),
            seconds=120,
            otherwise="the machine keeps its pressure",
        )


async def claim_not_bound(scene: Scene) -> None:
    size = {"requests": {"storage": "1Gi"}}
    claim = thing("v1", "PersistentVolumeClaim", "data")
    claim["spec"] = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": scene.namespace,
        "resources": size,
    }
    await scene.make("persistentvolumeclaims", claim)
    await scene.submit(volumes=[{"mount_path": "/data", "pvc": "data"}])
    await scene.waits_for("PersistentVolumeClaim")
    volume = thing("v1", "PersistentVolume", scene.namespace)
    volume["spec"] = {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/tmp"},
        "claimRef": {"namespace": scene.namespace, "name": "data"},
    }
    unmake = await scene.make("", volume, path="/api/v1/persistentvolumes")
    try:
        await scene.strike()
        await scene.stepping(2)
    finally:
        await unmake()


async def limit_range(scene: Scene) -> None:
    limits = thing("v1", "LimitRange", "small")
    limits["spec"] = {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]}
    unmake = await scene.make("limitranges", limits)
    await scene.submit()
    await scene.waits_for("maximum memory usage per Container is 1Gi")
    await unmake()
    await scene.strike()
    await scene.stepping(2)


async def admission_denies(scene: Scene) -> None:
    await scene.train(nodes="1:2")
    async with _denying_pods(scene):
        await scene.strike()
        await scene.delete_pod()
        await scene.repaired(1)
        repaired = scene.seconds
        await asyncio.sleep(AWAY_SECONDS)
        await scene.waits_for("no new pods today")
    await scene.strike()
    await scene.stepping(2, within=300)
    scene.seconds = repaired


async def preempted(scene: Scene) -> None:
    priority = thing("scheduling.k8s.io/v1", "PriorityClass", f"{scene.namespace}-urgent") | {"value": 1000}
    unmake = await scene.make("", priority, path="/apis/scheduling.k8s.io/v1/priorityclasses")
    try:
        await scene.train()
        pod = await scene.pod()
        machine = await scene.site.api.get(f"/api/v1/nodes/{pod['spec']['nodeName']}")
        assert machine is not None
        whole = int(machine["status"]["allocatable"]["memory"].removesuffix("Ki")) * 1024
        urgent = thing("v1", "Pod", "urgent")
        urgent["spec"] = {
            "priorityClassName": f"{scene.namespace}-urgent",
            "nodeSelector": {"kubernetes.io/hostname": pod["spec"]["nodeName"]},
            "containers": [
                {
                    "name": "urgent",
                    "image": BARE_IMAGE,
                    "command": ["sleep", "600"],
                    "resources": {"requests": {"memory": str(whole - GIBIBYTE)}},
                }
            ],
        }
        await scene.strike()
        unmake_urgent = await scene.make("pods", urgent)
        await _replaced(scene, pod["metadata"]["uid"])
        await scene.repaired()
        await unmake_urgent()
    finally:
        await unmake()


async def disruption_budget(scene: Scene) -> None:
    await scene.train()
    budget = thing("policy/v1", "PodDisruptionBudget", "whole")
    budget["spec"] = {"maxUnavailable": 0, "selector": {"matchExpressions": [OURS]}}
    unmake = await scene.make("policy/v1/poddisruptionbudgets", budget)
    machine = await scene.machine()
    await scene.site.api.set_spec(f"/api/v1/nodes/{machine}", unschedulable=True)
    try:
        await scene.strike()
        try:
            await scene.evict()
        except KubernetesError as refused:
            if refused.status != 429:
                raise
        else:
            raise TrialFailed("the budget did not hold the eviction back")
        await scene.undisturbed(AWAY_SECONDS)
        await unmake()
        await scene.strike()
        await scene.evict()
        await scene.repaired()
    finally:
        await scene.site.api.set_spec(f"/api/v1/nodes/{machine}", unschedulable=False)


async def sidecar_injected(scene: Scene) -> None:
    async with _injecting_sidecars(scene):
        await scene.train()
        names = [container["name"] for container in (await scene.pod())["spec"]["containers"]]
        if "mesh" not in names:
            raise TrialFailed(f"the webhook added nothing: {', '.join(names)}")
        await scene.strike()
        await scene.delete_pod()
        await scene.repaired()


async def topology_spread(scene: Scene) -> None:
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchExpressions": [OURS]},
    }
    await scene.train(role={"pod_spec": {"topologySpreadConstraints": [spread]}})
    await scene.strike()
    await scene.delete_pod()
    await scene.repaired()
    machines = {await scene.machine(rank) for rank in (0, 1)}
    if len(machines) != 2:
        raise TrialFailed(f"both nodes are on {', '.join(machines)}")


async def control_plane_restarted(scene: Scene) -> None:
    await scene.train()
    cluster = scene.site.cluster
    await _undisturbed_without(scene, cluster.kill_control_plane, cluster.start_control_plane)
    await scene.strike()
    await scene.delete_pod()
    await scene.repaired()


async def release_deleted(scene: Scene) -> None:
    await scene.train()
    await scene.strike()
    await scene.site.api.delete(f"/api/v1/namespaces/{scene.site.namespace}/pods")
    await scene.undisturbed(AWAY_SECONDS)
    await scene.site.serves()
    await scene.undisturbed(0)
    await scene.strike()
    await scene.delete_pod()
    await scene.repaired()


async def changed_while_created(scene: Scene) -> None:
    await scene.submit(nodes="1:2")
    await scene.pod(0)
    await scene.strike()
    patch = json.dumps({"spec": {"roles": {ROLE: {"nodes": 2}}}})
    await scene.kubectl(f"patch trainingjobs {scene.name} --type merge --patch '{patch}'")
    await scene.stepping(2)


async def deleted_while_created(scene: Scene) -> None:
    await scene.submit()
    await scene.pod(0)
    await scene.strike()
    await scene.delete()
    scene.seconds = time.time() - scene.struck


_UNDISTURBED = f"trains on, no pause above {LONGEST_PAUSE:.0f} s"
_REPAIRED = "both nodes step again"

EVENTS = (
    Event("kubelet killed, back after 10 s", _UNDISTURBED, kubelet_killed),
    Event("containerd killed, back after 10 s", _UNDISTURBED, containerd_killed),
    Event("machine NotReady", _UNDISTURBED, machine_not_ready),
    # The job may have filled the disk itself, so that counts.
    Event("eviction by disk pressure", _REPAIRED, evicted_by_pressure, says="evicted", charges=1),
    Event("volume claim does not bind, then does", "names the claim; starts", claim_not_bound),
    Event("LimitRange below the job's memory, then gone", "names the limit; starts", limit_range),
    Event("admission denies pods; a pod is deleted", "on with one node, says why; grows back", admission_denies),
    Event("preempted by an urgent pod", _REPAIRED, preempted, says="preempted"),
    Event("drain with, then without a disruption budget", "undisturbed, then " + _REPAIRED, disruption_budget, "drain"),
    # The sidecar ignores SIGTERM, so the job is repaired before the kubelet reports the pod's end: its agent knows only
    # that something ends it.
    Event("webhook adds a sidecar; a pod is deleted", _REPAIRED, sidecar_injected, says="disrupted"),
    Event("topology spread; a pod is deleted", "again on two machines", topology_spread, says="deleted"),
    Event("whole control plane killed, back after 10 s", "undisturbed; repairs afterwards", control_plane_restarted),
    Event("the release's pods deleted", "undisturbed; repairs afterwards", release_deleted, says="deleted"),
    Event("job changed while pods are created", _REPAIRED, changed_while_created),
    Event("job deleted while pods are created", "ends, nothing left", deleted_while_created),
    *PEOPLE,
    *MACHINES,
    *REFUSALS,
)


async def _undisturbed_without(scene: Scene, kill: Callable[[], None], start: Callable[[], None]) -> None:
    """Watches training while a component is away for some time, and a while after its return."""
    await scene.strike()
    await asyncio.to_thread(kill)
    try:
        await asyncio.sleep(AWAY_SECONDS / 2)
    finally:
        await asyncio.to_thread(start)
    await scene.undisturbed(AWAY_SECONDS)


async def _node(scene: Scene) -> Node:
    """Returns the machine of the node that the event hits."""
    machine = await scene.machine()
    (node,) = (node for node in scene.site.cluster.nodes() if node.name == machine)
    return node


async def _ready(site: Site, machine: str, wanted: str) -> bool:
    return await has_condition(site, machine, "Ready", wanted)


async def _evicted(scene: Scene, machine: str) -> None:
    async def moved() -> bool:
        pods = await scene.pods(1)
        return bool(pods) and pods[-1]["spec"].get("nodeName") not in (None, machine)

    await eventually(moved, seconds=180, otherwise="node 1 did not move", pause=0.5)


async def _replaced(scene: Scene, uid: str) -> None:
    async def replaced() -> bool:
        pods = await scene.pods(1)
        return bool(pods) and pods[-1]["metadata"]["uid"] != uid

    await eventually(replaced, seconds=120, otherwise="node 1 was not preempted", pause=0.2)


@asynccontextmanager
async def _denying_pods(scene: Scene) -> AsyncGenerator[None]:
    """Has the API server deny all pods of the namespace, as a policy of an administrator may."""
    group = "/apis/admissionregistration.k8s.io/v1"
    policy = thing("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", scene.namespace)
    policy["spec"] = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
            ]
        },
        "validations": [{"expression": "false", "message": "no new pods today"}],
    }
    binding = thing("admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicyBinding", scene.namespace)
    selector = {"matchLabels": {"kubernetes.io/metadata.name": scene.namespace}}
    binding["spec"] = {
        "policyName": scene.namespace,
        "validationActions": ["Deny"],
        "matchResources": {"namespaceSelector": selector},
    }
    unmake_policy = await scene.make("", policy, path=f"{group}/validatingadmissionpolicies")
    unmake_binding = await scene.make("", binding, path=f"{group}/validatingadmissionpolicybindings")
    try:
        await eventually(lambda: _denied(scene), seconds=60, otherwise="the policy is not in force", pause=0.2)
        yield
    finally:
        await unmake_binding()
        await unmake_policy()


async def _denied(scene: Scene) -> bool:
    pod = thing("v1", "Pod", "probe")
    pod["spec"] = {"containers": [{"name": "probe", "image": BARE_IMAGE}]}
    try:
        await scene.site.api.create(scene.path("pods"), pod, dry_run=True)
    except KubernetesError:
        return True
    return False


@asynccontextmanager
async def _injecting_sidecars(scene: Scene) -> AsyncGenerator[None]:
    """Serves a webhook that adds a container to every pod of the namespace, as a service mesh does."""
    certificates = scene.site.cluster.certificates
    certificate, key = certificates.issue("webhook", user="webhook", hosts=[f"IP:{API_ADDRESS}"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    application = web.Application()
    application.router.add_post("/mutate", _add_sidecar)
    runner = web.AppRunner(application)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, API_ADDRESS, port, ssl_context=tls).start()
    webhook = thing("admissionregistration.k8s.io/v1", "MutatingWebhookConfiguration", scene.namespace)
    webhook["webhooks"] = [
        {
            "name": "mesh.oncall.example",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "clientConfig": {
                "url": f"https://{API_ADDRESS}:{port}/mutate",
                "caBundle": base64.b64encode(certificates.authority.read_bytes()).decode(),
            },
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scene.namespace}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        }
    ]
    path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    unmake = await scene.make("", webhook, path=path)
    try:
        yield
    finally:
        await unmake()
        await runner.cleanup()


async def _add_sidecar(request: web.Request) -> web.Response:
    review = await request.json()
    sidecar = {"name": "mesh", "image": BARE_IMAGE, "command": ["sleep", "2147483647"]}
    patch = json.dumps([{"op": "add", "path": "/spec/containers/-", "value": sidecar}])
    response = {
        "uid": review["request"]["uid"],
        "allowed": True,
        "patchType": "JSONPatch",
        "patch": base64.b64encode(patch.encode()).decode(),
    }
    return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
