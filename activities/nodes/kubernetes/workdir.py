"""A submission's code in the cluster: immutable ConfigMaps, which every pod of the job mounts and unpacks.

    <archive>            the head: who sent what; the parts belong to it, and it to the job's anchor once there is one
    <archive>-0, -1, …   the parts, each below a ConfigMap's limit of 1 MiB

The API server's garbage collection does the rest: the parts go with the head, and the head with the job.
"""

from __future__ import annotations

import base64
from typing import Any

from activities.nodes.backend import NodeRefused
from activities.nodes.kubernetes.api import KubernetesApi, KubernetesError, Object
from perdure.spec.data import WorkdirArchive
from perdure.spec.job import JobSpec
from workflows.messages import WorkdirRequest

UNPACKED = "/perdure/workdir"
"""Where the command starts; in the volume that agent and training share, and gone with the pod."""

_PARTS = "/perdure-archive"
_KEY = "part"
_LABELS = {"app.kubernetes.io/managed-by": "perdure"}


def archive_of(spec: JobSpec) -> WorkdirArchive | None:
    """What was uploaded for the job, if anything was."""
    return spec.workdir.archive if spec.workdir else None


def carry(archive: WorkdirArchive, *, prepare: dict[str, Any], volumes: list[dict[str, Any]]) -> None:
    """Gives the archive to a pod's init container, which unpacks it (`agent.workdir`)."""
    sources = [
        {"configMap": {"name": _part_name(archive.name, index), "items": [{"key": _KEY, "path": f"{index:04}"}]}}
        for index in range(archive.parts)
    ]
    volumes.append({"name": "perdure-archive", "projected": {"sources": sources}})
    prepare["volumeMounts"] = [
        *prepare["volumeMounts"],
        {"name": "perdure-archive", "mountPath": _PARTS, "readOnly": True},
    ]
    prepare["env"] += [
        {"name": "PERDURE_PREPARE_ARCHIVE", "value": _PARTS},
        {"name": "PERDURE_PREPARE_ARCHIVE_DIGEST", "value": archive.digest},
        {"name": "PERDURE_PREPARE_WORKDIR", "value": UNPACKED},
    ]


async def keep_part(api: KubernetesApi, request: WorkdirRequest, index: int, content: bytes) -> None:
    """Makes one part, and the head where it is the first.

    Raises:
        NodeRefused: if the API server never will.
        KubernetesError: if it may, later.
    """
    path, archive = _config_maps(request.namespace), request.archive
    head: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": archive.name,
            "labels": _LABELS,
            "annotations": {
                "perdure.dev/workflow": request.job_id,
                "perdure.dev/digest": archive.digest,
                "perdure.dev/source": request.source,
            },
        },
    }
    try:
        owner = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": archive.name,
            "uid": (await _made(api, path, head))["metadata"]["uid"],
        }
        part: Object = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": _part_name(archive.name, index), "labels": _LABELS, "ownerReferences": [owner]},
            "immutable": True,
            "binaryData": {_KEY: base64.b64encode(content).decode()},
        }
        await _made(api, path, part)
    except KubernetesError as error:
        _refuse(error, request.namespace)
        raise


async def is_adopted(api: KubernetesApi, namespace: str, archive: str) -> bool:
    """Whether the archive belongs to a job's anchor."""
    head = await api.get(f"{_config_maps(namespace)}/{archive}")
    return bool(head and head["metadata"].get("ownerReferences"))


async def adopt(api: KubernetesApi, namespace: str, archive: str, anchor: dict[str, Any]) -> None:
    """Makes the archive go with a job; a second job that was started with it shares it.

    Raises:
        NodeRefused: if it is not there.
    """
    path = f"{_config_maps(namespace)}/{archive}"
    head = await api.get(path)
    others = [one for one in head["metadata"].get("ownerReferences", ()) if one["uid"] != anchor["uid"]] if head else []
    content: Object = {"metadata": {"ownerReferences": [*others, anchor | {"controller": False}]}}
    if head is None or await api.patch(path, content) is None:
        raise NodeRefused(
            f"workdir.archive: the uploaded code {archive} is not in namespace {namespace} any more; it goes with its "
            "job, or 15 min after an upload without one. Submit the job again"
        )


async def remove(api: KubernetesApi, namespace: str, archive: str) -> None:
    """Removes the head, and with it all parts."""
    await api.delete(f"{_config_maps(namespace)}/{archive}")


async def _made(api: KubernetesApi, path: str, content: Object) -> Object:
    """Makes an object whose content never differs under its name; an earlier try may have made it."""
    try:
        return await api.create(path, content)
    except KubernetesError as error:
        found = await api.get(f"{path}/{content['metadata']['name']}") if error.reason == "AlreadyExists" else None
        if found is None:
            raise
        return found


def _refuse(error: KubernetesError, namespace: str) -> None:
    """Reports what a user has to change; the user waits for an answer, also where room may come with time (a quota)."""
    if error.status == 404:
        raise NodeRefused(f"namespace {namespace} does not exist; create it, or set `namespace`") from error
    if error.status in (400, 403, 413, 422):
        raise NodeRefused(f"the API server does not take the code: {error.message}") from error


def _part_name(archive: str, index: int) -> str:
    return f"{archive}-{index}"


def _config_maps(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"
