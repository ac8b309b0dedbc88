"""The anchor of a job: the one object that owns all its pods.

Pods without a controller prevent their machines from being drained and scaled down, and nothing cleans them up. So a
ConfigMap represents the job's run: pods name it as their controller and are deleted together with it. A user who
deletes it requests the end of the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes.gangs import SharedObject
from perdure.activities.nodes.kubernetes.naming import JOB, OURS, UID, is_ours, selector
from perdure.activities.nodes.kubernetes.workdir import adopt, archive_of
from perdure.base.kubernetes import TRANSIENT, KubernetesApi, Object, core_path
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import NodeRequest
from perdure.contract.names import run_name

_REMEMBERED = 10.0
"""Seconds for which an anchor is remembered: long enough to create a thousand nodes at once, too short for a job to be
suspended and to run again."""


class Anchors:
    """Creates each job's anchor and shared objects once, while many nodes are created at the same time."""

    def __init__(self, api: KubernetesApi) -> None:
        """Creates no object yet.

        Args:
            api: the API server to create them at.
        """
        self._api = api
        self._owners: dict[tuple[str, str, int], tuple[float, asyncio.Task[dict[str, Any]]]] = {}
        """Anchors by job uid, role and minimum size: the shared objects depend on all three."""

    async def owner_reference(self, request: NodeRequest, shared: Sequence[SharedObject] = ()) -> dict[str, Any]:
        """Returns the owner reference that makes a pod part of its job.

        Args:
            request: the pod's node.
            shared: the objects that belong to the job beside its pods.

        Raises:
            KubernetesError: if the anchor can be neither found nor created.
            NodeRefused: if the cluster does not know the kind of a shared object, or the job's code is missing.
        """
        key = (request.node.uid, request.node.role, request.minimum)
        now = asyncio.get_running_loop().time()
        queried_at, asking = self._owners.get(key, (0.0, None))
        if asking is None or now - queried_at > _REMEMBERED or (asking.done() and asking.exception()):
            asking = asyncio.create_task(self._ensure(request, shared))
            # A worker sees many jobs, and most of them only once.
            self._owners = {one: known for one, known in self._owners.items() if now - known[0] <= _REMEMBERED}
            self._owners[key] = (now, asking)
        return await asyncio.shield(asking)

    async def remove(self, namespace: str, uid: str) -> None:
        """Deletes the anchor of a job without pods. If the job runs again, its anchor is created again."""
        self._owners = {key: owner for key, owner in self._owners.items() if key[0] != uid}
        path = core_path(namespace, "configmaps")
        for anchor in await self._api.list(path, labels=f"{selector(OURS)},{UID}={uid}"):
            await self._api.delete(f"{path}/{anchor['metadata']['name']}", uid=anchor["metadata"]["uid"])

    async def why_gone(self, namespace: str, name: str, uid: str = "") -> str:
        """Returns why the job was removed from the cluster; empty if its anchor exists.

        Args:
            namespace: the anchor's namespace.
            name: the anchor's name.
            uid: the anchor's uid, if known: an anchor that was created again under the name is another one.

        Raises:
            KubernetesError: if the API server refuses the request.
        """
        path = core_path(namespace, "configmaps")
        try:
            found = await self._api.get(f"{path}/{name}")
        except KubernetesError as error:
            if reason := await why_namespace_is_gone(self._api, error, namespace):
                return reason
            raise
        try:
            # The worker may lack the right to read namespaces; a dry-run create shows whether this one still exists.
            await self._api.create(path, _config_map({"name": name}), dry_run=True)
        except KubernetesError as error:
            if reason := await why_namespace_is_gone(self._api, error, namespace):
                return reason
        stands = found is not None and uid in ("", found["metadata"]["uid"])
        return "" if stands else f"its ConfigMap {name} was deleted in the cluster"

    async def _ensure(self, request: NodeRequest, shared: Sequence[SharedObject]) -> dict[str, Any]:
        spec = request.spec
        name = run_name(spec.name, request.node.uid)
        content = _config_map(
            {
                "name": name,
                "labels": {**OURS, JOB: spec.name, UID: request.node.uid},
                "annotations": {"perdure.dev/workflow": request.job_id, "perdure.dev/run": request.job_first_run_id},
            }
        )
        made = await self._api.create_or_get(core_path(spec.namespace, "configmaps"), content)
        if not is_ours(made, {UID: request.node.uid}):
            raise NodeRefused(
                f"a ConfigMap {name} that does not belong to this job exists in namespace {spec.namespace}; "
                "remove it, or give the job another name"
            )
        owner = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": name,
            "uid": made["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
        for one in shared:
            await self._ensure_shared(one, owner)
        if archive := archive_of(request.spec):
            await adopt(self._api, request.spec.namespace, archive, owner)
        return owner

    async def _ensure_shared(self, shared: SharedObject, owner: dict[str, Any]) -> None:
        content = shared.content
        name, spec = content["metadata"]["name"], content["spec"]
        owned = content | {"metadata": {**content["metadata"], "ownerReferences": [owner]}}
        try:
            await self._api.create(shared.collection, owned, strict=True)
        except KubernetesError as error:
            if error.status == 404:
                raise NodeRefused(
                    f"the API server knows no {content['kind']} of {content['apiVersion']}; install the site's gang "
                    "system, or change PERDURE_KUBERNETES_GANGS of the worker"
                ) from error
            if error.status != 409:
                raise
            found = await self._api.get(f"{shared.collection}/{name}")
            is_own = found is not None and owner["uid"] in _owners(found)
            if shared.mutable and found and is_own and found["spec"] != found["spec"] | spec:
                await self._api.patch(f"{shared.collection}/{name}", {"spec": spec})


def _owners(found: Object) -> list[str]:
    return [one["uid"] for one in found["metadata"].get("ownerReferences", ())]


def _config_map(metadata: Mapping[str, Any]) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": dict(metadata)}


def shows_end_of_namespace(error: KubernetesError, namespace: str) -> str:
    """Returns how a refused creation shows that the namespace is gone; empty if it does not show that."""
    if "NamespaceTerminating" in error.causes:
        return f"its namespace {namespace} is being deleted"
    return f"its namespace {namespace} was deleted" if error.status == 404 else ""


async def why_namespace_is_gone(api: KubernetesApi, error: KubernetesError, namespace: str) -> str:
    """Returns how the namespace of a refused request is gone; empty if nothing shows that it is.

    The rights in a namespace go with it, in any order: a request that they allow is forbidden then. A worker that may
    read the namespace itself sees why.
    """
    if (reason := shows_end_of_namespace(error, namespace)) or not error.unauthorized:
        return reason
    try:
        found = await api.get(f"/api/v1/namespaces/{namespace}", insist=False)
    except (KubernetesError, *TRANSIENT):
        return ""
    if found is None:
        return f"its namespace {namespace} was deleted"
    return f"its namespace {namespace} is being deleted" if found["metadata"].get("deletionTimestamp") else ""
