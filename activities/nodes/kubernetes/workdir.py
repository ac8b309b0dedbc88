"""Stores a submission's code in the cluster: immutable ConfigMaps, which every pod of the job mounts and unpacks.

    <archive>            the head: sender and digest; owns the parts, and is owned by the job's anchor once that exists
    <archive>-0, -1, …   the parts, each below a ConfigMap's limit of 1 MiB

The API server's garbage collection deletes the parts with the head, and the head with the job.
"""

from __future__ import annotations

import base64
from typing import Any

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes.naming import OURS, is_ours
from perdure.base.kubernetes import KubernetesApi, Object, core_path
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import WorkdirRequest
from perdure.spec.data import WorkdirArchive
from perdure.spec.job import JobSpec

UNPACKED = "/perdure/workdir"
"""The command's working directory, in the volume that agent and training container share; it is deleted with the
pod."""

VOLUME = "perdure-archive"
"""The volume of the archive's parts, which only the init container mounts."""
_PARTS = "/perdure-archive"
_KEY = "part"
_DIGEST = "perdure.dev/digest"
"""The annotation of a head with the digest of its archive."""


def archive_of(spec: JobSpec) -> WorkdirArchive | None:
    """Returns the archive that was uploaded for the job; None if there is none."""
    return spec.workdir.archive if spec.workdir else None


def config_maps_of(archive: WorkdirArchive) -> tuple[str, ...]:
    """Returns the names of the ConfigMaps that hold the archive: the head, and its parts in order."""
    return (archive.name, *(_part_name(archive.name, index) for index in range(archive.parts)))


def carry(archive: WorkdirArchive, *, prepare: dict[str, Any], volumes: list[dict[str, Any]]) -> None:
    """Mounts the archive in a pod's init container, which unpacks it (`perdure.agent.workdir`)."""
    sources = [
        {"configMap": {"name": name, "items": [{"key": _KEY, "path": f"{index:04}"}]}}
        for index, name in enumerate(config_maps_of(archive)[1:])
    ]
    volumes.append({"name": VOLUME, "projected": {"sources": sources}})
    prepare["volumeMounts"] = [
        *prepare["volumeMounts"],
        {"name": VOLUME, "mountPath": _PARTS, "readOnly": True},
    ]
    prepare["env"] += [
        {"name": "PERDURE_PREPARE_ARCHIVE", "value": _PARTS},
        {"name": "PERDURE_PREPARE_ARCHIVE_DIGEST", "value": archive.digest},
        {"name": "PERDURE_PREPARE_WORKDIR", "value": UNPACKED},
    ]


async def keep_part(api: KubernetesApi, request: WorkdirRequest, index: int, content: bytes) -> None:
    """Creates one part, and the head if it does not exist yet.

    Raises:
        NodeRefused: if the API server can never create it.
        KubernetesError: if a later attempt may succeed.
    """
    path, archive = core_path(request.namespace, "configmaps"), request.archive
    head: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": archive.name,
            "labels": OURS,
            "annotations": {
                "perdure.dev/workflow": request.job_id,
                _DIGEST: archive.digest,
                "perdure.dev/source": request.source,
            },
        },
    }
    try:
        there = await api.create_or_get(path, head)
        if not _is_head(there, archive):
            raise NodeRefused(f"the ConfigMap {archive.name} in namespace {request.namespace} is not of this upload")
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": archive.name, "uid": there["metadata"]["uid"]}
        part: Object = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": _part_name(archive.name, index), "labels": OURS, "ownerReferences": [owner]},
            "immutable": True,
            "binaryData": {_KEY: base64.b64encode(content).decode()},
        }
        await api.create_or_get(path, part)
    except KubernetesError as error:
        _refuse(error, request.namespace)
        raise


async def is_adopted(api: KubernetesApi, namespace: str, archive: WorkdirArchive) -> bool:
    """Returns whether the archive belongs to a job's anchor."""
    head = await _head(api, namespace, archive)
    return bool(head and head["metadata"].get("ownerReferences"))


async def adopt(api: KubernetesApi, namespace: str, archive: WorkdirArchive, anchor: dict[str, Any]) -> None:
    """Makes a job's anchor an owner of the archive. A second job that was started with the same archive shares it.

    Raises:
        NodeRefused: if the archive does not exist.
    """
    head = await _head(api, namespace, archive)
    others = [one for one in head["metadata"].get("ownerReferences", ()) if one["uid"] != anchor["uid"]] if head else []
    owners: Object = {"ownerReferences": [*others, anchor | {"controller": False}]}
    path = _path(namespace, archive)
    if head is None or await api.patch(path, {"metadata": {"uid": head["metadata"]["uid"], **owners}}) is None:
        raise NodeRefused(
            f"workdir.archive: the uploaded code {archive.name} is not in namespace {namespace} any more; it is "
            "deleted with its job, or 15 min after an upload without one. Submit the job again"
        )


async def remove(api: KubernetesApi, namespace: str, archive: WorkdirArchive) -> None:
    """Deletes the head, and with it all parts."""
    if head := await _head(api, namespace, archive):
        await api.delete(_path(namespace, archive), uid=head["metadata"]["uid"])


async def _head(api: KubernetesApi, namespace: str, archive: WorkdirArchive) -> Object | None:
    """Returns the archive's head. A specification may name any ConfigMap: one that is not an archive's head is not
    returned."""
    found = await api.get(_path(namespace, archive))
    return found if found and _is_head(found, archive) else None


def _is_head(found: Object, archive: WorkdirArchive) -> bool:
    annotations: dict[str, str] = found["metadata"].get("annotations") or {}
    return is_ours(found) and annotations.get(_DIGEST) == archive.digest


def _refuse(error: KubernetesError, namespace: str) -> None:
    """Raises `NodeRefused` for errors that a user has to resolve. The user waits for the upload, so an exhausted quota,
    which may have room later, is refused as well."""
    if error.status == 404:
        raise NodeRefused(f"namespace {namespace} does not exist; create it, or set `namespace`") from error
    if error.status in (400, 403, 413, 422):
        raise NodeRefused(f"the API server rejects the code: {error.message}") from error


def _path(namespace: str, archive: WorkdirArchive) -> str:
    return f"{core_path(namespace, 'configmaps')}/{archive.name}"


def _part_name(archive: str, index: int) -> str:
    return f"{archive}-{index}"
