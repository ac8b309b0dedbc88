"""Tests of forged requests to a worker: they name objects of a real cluster that are not the job's own."""

from __future__ import annotations

from contextlib import aclosing
from datetime import timedelta
from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.base.kubernetes import Object
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import GroupRef, NodeEvent, WorkdirRequest
from perdure.spec.data import Workdir, WorkdirArchive
from perdure.spec.job import Backend
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.conftest import backend
from tests.kubernetes.pods import PodJob

__all__ = ["backend"]

ARCHIVE = WorkdirArchive(name="perdure-workdir-0123456789abcdef", parts=1, digest=f"sha256:{'0' * 64}")


async def foreign_pod(job: PodJob, name: str, labels: dict[str, str] | None = None) -> Object:
    container = {"name": "x", "image": BARE_IMAGE, "command": ["/bin/sleep", "600"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        # No machine has room for it, so that it costs nothing.
        "spec": {"containers": [container], "nodeSelector": {"no": "machine"}},
    }
    return await job.api.create(job.pods_path, pod)


async def config_map(job: PodJob, name: str, **metadata: Any) -> Object:
    content = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **metadata}, "data": {"key": "kept"}}
    return await job.api.create(job.anchors_path, content)


async def stands(job: PodJob, path: str, made: Object) -> bool:
    """Whether an object is as it was made."""
    found = await job.api.get(f"{path}/{made['metadata']['name']}")
    return found is not None and all(
        found["metadata"].get(field) == made["metadata"].get(field)
        for field in ("uid", "labels", "ownerReferences", "deletionTimestamp")
    )


@pytest.mark.long("cluster-faults")
async def test_foreign_pods_are_neither_deleted_nor_described(backend: KubernetesBackend, job: PodJob) -> None:
    plain = await foreign_pod(job, "database")
    # Another job's node, which a request for this job's names.
    other = job.changed()
    await backend.create(other.request())
    labels = {"job": "made-up", "uid": job.uid, "role": "worker", "group": "0", "rank": "3", "incarnation": "1"}
    imitation = await foreign_pod(job, job.name(3), {f"perdure.dev/{key}": value for key, value in labels.items()})
    await backend.create(job.request())
    for name in ("database", other.name()):
        forged = job.ref().model_copy(update={"name": name})
        assert await backend.describe(forged) is None
        await backend.delete(forged)
    assert await backend.describe(job.ref(3)) is None
    await backend.delete(job.ref(3))
    async with aclosing(backend.watch(job.watch())) as watch:
        seen = {event.rank for event in await anext(watch) if isinstance(event, NodeEvent)}
    assert seen == {0}, "the watch reports the job's own node alone"
    group = GroupRef(
        uid=job.uid,
        role="worker",
        group=0,
        backend="kubernetes",
        namespace=job.namespace,
        grace=timedelta(seconds=1),
    )
    await backend.clear(group)
    assert await stands(job, job.pods_path, plain)
    assert await stands(job, job.pods_path, imitation)
    assert await other.pod() is not None
    assert await job.pod() is None, "its own pod is deleted"
    await backend.delete(other.ref(winding_down=True))


@pytest.mark.long("cluster-faults")
async def test_a_name_leads_to_no_other_object(backend: KubernetesBackend, job: PodJob) -> None:
    kept = await config_map(job, "kept")
    for name in ("../configmaps/kept", "%2e%2e/configmaps/kept", "x?dryRun=All", ""):
        with pytest.raises(KubernetesError, match="not the path of an object"):
            await job.api.delete(f"{job.pods_path}/{name}")
    forged = job.ref().model_copy(update={"namespace": f"{job.namespace}/configmaps/kept?x="})
    with pytest.raises(KubernetesError, match="not the path of an object"):
        await backend.delete(forged)
    assert await stands(job, job.anchors_path, kept)


@pytest.mark.long("cluster-faults")
async def test_a_foreign_config_map_is_no_upload(backend: KubernetesBackend, job: PodJob) -> None:
    kept = await config_map(job, ARCHIVE.name)
    request = WorkdirRequest(
        archive=ARCHIVE, namespace=job.namespace, backend=Backend.KUBERNETES, job_id="job/x/y", source="attacker"
    )
    await backend.remove_archive(request)
    assert not await backend.is_adopted(request)
    with pytest.raises(NodeRefused, match="is not of this upload"):
        await backend.keep_part(request, 0, b"")
    spec = job.spec.model_copy(update={"workdir": Workdir(path=".", archive=ARCHIVE)})
    # A job that adopted it would have it deleted at the job's end.
    with pytest.raises(NodeRefused, match="is not in namespace"):
        await backend.create(job.request().model_copy(update={"spec": spec}))
    assert await stands(job, job.anchors_path, kept)


async def test_a_foreign_config_map_is_no_anchor(backend: KubernetesBackend, job: PodJob) -> None:
    kept = await config_map(job, f"perdure-made-up-{job.uid}", labels={"perdure.dev/uid": job.uid})
    with pytest.raises(NodeRefused, match="that does not belong to this job exists"):
        await backend.create(job.request())
    await backend.delete(job.ref(winding_down=True))
    assert await stands(job, job.anchors_path, kept)
