"""Events in which the cluster refuses or lacks something that a job needs: images, room, volumes, its own API."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.recovery.processes import free_port
from scripts.cluster.control_plane import ETCD
from scripts.cluster.machine import API_ADDRESS

from .objects import thing
from .scene import Event, Scene

AWAY_SECONDS = 15.0
"""Seconds for which the API server takes nothing."""
_ZONE = "topology.kubernetes.io/zone"
_FLOWS = "/apis/flowcontrol.apiserver.k8s.io/v1"


async def image_missing(scene: Scene) -> None:
    await scene.submit(role={"image": "registry.invalid/acme/train:1"})
    await scene.waits_for("its image cannot be pulled")


async def quota_full(scene: Scene) -> None:
    quota = thing("v1", "ResourceQuota", "small")
    quota["spec"] = {"hard": {"pods": "1"}}
    unmake = await scene.make("resourcequotas", quota)
    await scene.submit()
    await scene.waits_for("quota small is used up")
    await unmake()
    await scene.strike()
    await scene.stepping(2)


async def pod_security(scene: Scene) -> None:
    await scene.train(nodes="1:2")
    label = f"namespace {scene.namespace} pod-security.kubernetes.io/enforce"
    await scene.kubectl(f"label {label}=baseline")
    try:
        await scene.strike()
        await scene.delete_pod()
        await scene.repaired(1)
        repaired = scene.seconds
        await scene.waits_for("violates PodSecurity")
    finally:
        await scene.kubectl(f"label {label}-")
    await scene.strike()
    await scene.stepping(2)
    scene.seconds = repaired


async def webhook_away(scene: Scene) -> None:
    await scene.train(nodes="1:2")
    webhook = thing("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration", scene.namespace)
    webhook["webhooks"] = [
        {
            "name": "away.oncall.example",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
            "clientConfig": {"url": f"https://{API_ADDRESS}:{free_port()}/validate"},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scene.namespace}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        }
    ]
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    unmake = await scene.make("", webhook, path=path)
    try:
        # The API server takes a new webhook in a moment later.
        await asyncio.sleep(2)
        await scene.strike()
        await scene.delete_pod()
        await scene.repaired(1)
        repaired = scene.seconds
        await scene.waits_for("failed calling webhook")
    finally:
        await unmake()
    await scene.strike()
    await scene.stepping(2)
    scene.seconds = repaired


async def zone_lost(scene: Scene) -> None:
    volume = thing("v1", "PersistentVolume", scene.namespace)
    in_zone = {"key": _ZONE, "operator": "In", "values": ["lost"]}
    volume["spec"] = {
        "accessModes": ["ReadWriteMany"],
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/tmp"},
        "claimRef": {"namespace": scene.namespace, "name": "data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [in_zone]}]}},
    }
    unmake = await scene.make("", volume, path="/api/v1/persistentvolumes")
    claim = thing("v1", "PersistentVolumeClaim", "data")
    claim["spec"] = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "volumeName": scene.namespace,
        "resources": {"requests": {"storage": "1Gi"}},
    }
    await scene.make("persistentvolumeclaims", claim)
    machines = " ".join(node.name for node in scene.site.cluster.nodes())
    try:
        await scene.submit(volumes=[{"mount_path": "/data", "pvc": "data"}])
        await scene.waits_for("affinity")
        await scene.kubectl(f"label nodes {machines} {_ZONE}=lost")
        await scene.strike()
        await scene.stepping(2)
    finally:
        await scene.kubectl(f"label nodes {machines} {_ZONE}-")
        await unmake()


async def etcd_full(scene: Scene) -> None:
    await scene.train()
    await scene.strike()
    async with _etcd_full():
        await asyncio.sleep(AWAY_SECONDS)
        await scene.undisturbed(AWAY_SECONDS)
    await scene.strike()
    await scene.delete_pod()
    await scene.repaired()


async def overloaded(scene: Scene) -> None:
    await scene.train()
    async with _answers_429(scene):
        await scene.strike()
        await scene.undisturbed(AWAY_SECONDS)
        await scene.delete_pod()
        await asyncio.sleep(AWAY_SECONDS)
    # From when requests are taken again.
    scene.struck += 2 * AWAY_SECONDS
    await scene.repaired()


@asynccontextmanager
async def _etcd_full() -> AsyncGenerator[None]:
    """Has etcd take no writes but deletions, as where its space is used up."""
    (member,) = (await _ask_etcd("cluster/member/list", {}))["members"]
    alarm = {"memberID": member["ID"], "alarm": "NOSPACE"}
    await _ask_etcd("maintenance/alarm", {"action": "ACTIVATE", **alarm})
    try:
        yield
    finally:
        await _ask_etcd("maintenance/alarm", {"action": "DEACTIVATE", **alarm})


async def _ask_etcd(path: str, content: Mapping[str, Any]) -> dict[str, Any]:
    def ask() -> dict[str, Any]:
        request = urllib.request.Request(f"{ETCD}/v3/{path}", data=json.dumps(content).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    return await asyncio.to_thread(ask)


@asynccontextmanager
async def _answers_429(scene: Scene) -> AsyncGenerator[None]:
    """Has the API server answer 429 to every request of the release's parts, as where priority and fairness give their
    share to others."""
    name = scene.site.namespace
    level = thing("flowcontrol.apiserver.k8s.io/v1", "PriorityLevelConfiguration", name)
    none = {"nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0}
    level["spec"] = {"type": "Limited", "limited": {**none, "limitResponse": {"type": "Reject"}}}
    flow = thing("flowcontrol.apiserver.k8s.io/v1", "FlowSchema", name)
    everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True, "namespaces": ["*"]}
    account = {"kind": "ServiceAccount", "serviceAccount": {"namespace": name, "name": "*"}}
    flow["spec"] = {
        "priorityLevelConfiguration": {"name": name},
        "matchingPrecedence": 2,
        "rules": [{"subjects": [account], "resourceRules": [everything]}],
    }
    unmake_level = await scene.make("", level, path=f"{_FLOWS}/prioritylevelconfigurations")
    unmake_flow = await scene.make("", flow, path=f"{_FLOWS}/flowschemas")
    try:
        yield
    finally:
        await unmake_flow()
        await unmake_level()


_GROWS_BACK = "on with one node, says why; grows back"

REFUSALS = (
    Event("image cannot be pulled", "names the image's error; ends", image_missing),
    Event("quota of pods used up, then raised", "names the quota; starts", quota_full),
    Event("PodSecurity forbids pods; a pod is deleted", _GROWS_BACK, pod_security),
    Event("webhook away with failurePolicy Fail; a pod is deleted", _GROWS_BACK, webhook_away),
    Event("volume in a zone that is lost, then back", "names the affinity; starts", zone_lost),
    Event("etcd is full for 15 s", "undisturbed; repairs afterwards", etcd_full, says="deleted"),
    Event("429 for each request for 30 s; a pod is deleted", "undisturbed; repairs afterwards", overloaded),
)
