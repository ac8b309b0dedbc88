"""Events of people with kubectl: what they delete, look at, and change."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.kubernetes.site import eventually
from benchmarks.recovery.processes import TrialFailed
from perdure.contract import JobPhase
from scripts.cluster.images import BARE_IMAGE

from .scene import END_SECONDS, Event, Scene

_RIGHTS = "rbac.authorization.k8s.io/v1"


async def force_deleted(scene: Scene) -> None:
    await scene.train()
    name = (await scene.pod())["metadata"]["name"]
    await scene.strike()
    await scene.kubectl(f"delete pod {name} --force --grace-period=0 --wait=false")
    await scene.repaired()


async def debugged(scene: Scene) -> None:
    await scene.train()
    name = (await scene.pod())["metadata"]["name"]
    await scene.strike()
    options = f"--namespace={scene.namespace} --image={BARE_IMAGE} --image-pull-policy=IfNotPresent --target=training"
    # The last word, the namespace again, is the name of the shell.
    await scene.kubectl(f"debug {name} {options} -- sh -c 'sleep 3'")

    async def has_run() -> bool:
        pod = await scene.site.api.get(f"{scene.path('pods')}/{name}")
        states = [one["state"] for one in (pod or {})["status"].get("ephemeralContainerStatuses") or ()]
        return any("terminated" in state for state in states)

    await eventually(has_run, seconds=60, otherwise="the container for debugging did not run", pause=0.5)
    await scene.undisturbed(0)


async def labels_taken_off(scene: Scene) -> None:
    await scene.train()
    name = (await scene.pod())["metadata"]["name"]
    await scene.strike()
    await scene.kubectl(f"label pod {name} perdure.dev/uid-")
    await scene.repaired()


async def namespace_made_again(scene: Scene) -> None:
    await scene.train()
    api, path = scene.site.api, f"/api/v1/namespaces/{scene.namespace}"
    rights = {kind: await api.list(scene.path(f"{_RIGHTS}/{kind}")) for kind in ("roles", "rolebindings")}
    first = await scene.status()
    began = time.time()
    await api.delete(path)

    async def gone() -> bool:
        return await api.get(path) is None

    await eventually(gone, seconds=4 * END_SECONDS, otherwise="the namespace does not go", pause=0.5)
    seconds = time.time() - began
    status = await scene.status()
    if status.phase not in (JobPhase.CANCELLED, JobPhase.FAILED):
        raise TrialFailed(f"its job is {status.phase} although its namespace is gone: {status.reason}")
    await api.create(
        "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": scene.namespace}}
    )
    for kind, found in rights.items():
        for one in found:
            await api.create(scene.path(f"{_RIGHTS}/{kind}"), _again(one))
    await eventually(
        lambda: api.get(f"{path}/serviceaccounts/default"), seconds=60, otherwise="the namespace has no service account"
    )
    # The operator tries a namespace that it has lost again after half a minute at most.
    await scene.train()
    if (await scene.status()).uid == first.uid:
        raise TrialFailed("the new object has the former job")
    scene.seconds = seconds


def _again(one: dict[str, Any]) -> dict[str, Any]:
    """Returns an object as it was applied."""
    metadata = {name: one["metadata"][name] for name in ("name", "labels") if name in one["metadata"]}
    return {**{name: content for name, content in one.items() if name != "status"}, "metadata": metadata}


PEOPLE = (
    Event("kubectl delete pod --force", "both nodes step again", force_deleted, says="deleted"),
    Event("kubectl debug in a node", "trains on", debugged),
    Event("kubectl takes a label off a pod", "both nodes step again", labels_taken_off),
    Event("namespace deleted, and made again", "ends with it; starts in the new one", namespace_made_again),
)
