"""The Kubernetes backend: each node is a pod. The API server's objects are the truth; nothing is kept here.

What the API server refuses for a reason that lies in the request is refused for good, with its words; everything else
is tried again, here for seconds and by Temporal after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NoReturn

from activities.nodes.backend import Fact, JobRevoked, NodeNotYet, NodeRefused
from activities.nodes.kubernetes import workdir
from activities.nodes.kubernetes.anchor import Anchors, why_namespace_is_gone
from activities.nodes.kubernetes.api import Changed, KubernetesApi, KubernetesError, Listed, Removed
from activities.nodes.kubernetes.facts import event_of, is_held, machine_is_silent
from activities.nodes.kubernetes.gangs import SharedObject
from activities.nodes.kubernetes.naming import INCARNATION, RANK, ROLE, UID
from activities.nodes.kubernetes.objects import Pod
from activities.nodes.kubernetes.pod import BEYOND_GRACE, pod_of
from activities.nodes.kubernetes.presets import find_presets, with_preset
from activities.nodes.kubernetes.settings import KubernetesSettings
from activities.nodes.kubernetes.watch import GroupWatch, pods_of
from workflows.messages import CreatedNode, NodeEvent, NodeRef, NodeRequest, WatchRequest, WorkdirRequest

logger = logging.getLogger(__name__)


class KubernetesBackend:
    """Nodes as pods. See `NodeBackend` for what it promises; of a machine that does not answer nobody can promise that
    nothing runs on it, so `delete` returns once the API server has condemned the pod there."""

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings, *, kubeconfig: str | None = None) -> None:
        """Connects when it is first asked for something.

        Args:
            settings: the site's.
            kubeconfig: path of a kubeconfig; else `KUBECONFIG`, the pod's own service account, or the user's file.
        """
        self._settings = settings
        self._kubeconfig = kubeconfig
        self._creating = asyncio.Semaphore(settings.creates_at_once)
        self._connecting = asyncio.Lock()
        self._connected: tuple[KubernetesApi, Anchors] | None = None

    async def create(self, request: NodeRequest) -> CreatedNode:
        """Makes the pod, unless it has been made before."""
        api, anchors = await self._connection()
        async with self._creating:
            try:
                await self._await_turn(api, request)
                pod = pod_of(request, self._settings, anchor=await anchors.owner_reference(request))
                await api.create(pods_of(request.spec.namespace), pod)
            except KubernetesError as error:
                if error.reason == "AlreadyExists":
                    await self._accept_existing(api, request)
                else:
                    _refuse(error, request)
        return CreatedNode(name=request.name)

    async def delete(self, node: NodeRef) -> None:
        """Ends the pod and waits until it is no more; the last one of a job takes the job's anchor along."""
        api, anchors = await self._connection()
        path = pods_of(node.namespace)
        grace = int(node.grace.total_seconds()) + BEYOND_GRACE
        finalizer = self._settings.gangs.finalizer
        try:
            if await api.delete(f"{path}/{node.name}", grace=grace) is not None:
                await _until_gone(api, path, node.name, or_held_by=finalizer)
        except KubernetesError as error:
            if error.status != 403 or await _may_create_pods(api, node.namespace):
                raise
            # A job that was refused for lack of rights has no pods, and must not wait for the right to delete them.
            logger.warning("%s is not deleted, since pods may not even be created there: %s", node.name, error)
            return
        if finalizer and not node.replaced:
            await self._let_go(api, node, finalizer)
            await _until_gone(api, path, node.name)
        if node.winding_down and not await api.list(path, labels=f"{UID}={node.uid}", limit=1):
            await anchors.remove(node.namespace, node.uid)

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        """What the pod's object says now."""
        api, _ = await self._connection()
        pod = await api.get(f"{pods_of(node.namespace)}/{node.name}")
        return None if pod is None else event_of(Pod.model_validate(pod))

    async def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[Fact, ...]]:
        """Follows the group's pods by one list and one watch."""
        api, anchors = await self._connection()
        watch = GroupWatch(api, anchors, request)
        async with contextlib.aclosing(watch.batches()) as batches:
            async for batch in batches:
                yield batch

    async def keep_part(self, request: WorkdirRequest, index: int, content: bytes) -> None:
        """Keeps one part of a submission's code; see `WorkdirBackend`."""
        api, _ = await self._connection()
        await workdir.keep_part(api, request, index, content)

    async def is_adopted(self, request: WorkdirRequest) -> bool:
        """Whether a job has the code."""
        api, _ = await self._connection()
        return await workdir.is_adopted(api, request.namespace, request.archive.name)

    async def remove_archive(self, request: WorkdirRequest) -> None:
        """Removes the code."""
        api, _ = await self._connection()
        await workdir.remove(api, request.namespace, request.archive.name)

    async def with_preset(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """A specification over the preset that it names; see `PresetBackend`."""
        api, _ = await self._connection()
        return with_preset(data, await find_presets(api, self._settings.presets_namespace))

    async def close(self) -> None:
        """Closes the connections to the API server."""
        if self._connected is not None:
            await self._connected[0].close()
            self._connected = None

    async def _connection(self) -> tuple[KubernetesApi, Anchors]:
        async with self._connecting:
            if self._connected is None:
                api = await KubernetesApi.connect(self._kubeconfig)
                self._connected = (api, Anchors(api, self._shared_objects))
            return self._connected

    def _shared_objects(self, request: NodeRequest) -> Sequence[SharedObject]:
        return self._settings.gangs.shared_objects(request, pod_of(request, self._settings))

    async def _await_turn(self, api: KubernetesApi, request: NodeRequest) -> None:
        """Does nothing where the pod may be made.

        Raises:
            NodeNotYet: if others must come or go first.
        """
        gangs, node = self._settings.gangs, request.node
        if ranks := gangs.needs(request):
            of_ranks = f"{RANK} in ({','.join(map(str, sorted(ranks)))})"
            pods = await api.list(
                pods_of(request.spec.namespace), labels=f"{UID}={node.uid},{ROLE}={node.role},{of_ranks}"
            )
            if obstacle := gangs.obstacle(request, [Pod.model_validate(one) for one in pods]):
                raise NodeNotYet(obstacle)

    async def _let_go(self, api: KubernetesApi, node: NodeRef, finalizer: str) -> None:
        """Gives up what is held of the node: of this incarnation, and of those that it was to replace."""
        path = pods_of(node.namespace)
        for one in await api.list(path, labels=f"{UID}={node.uid},{ROLE}={node.role},{RANK}={node.rank}"):
            pod = Pod.model_validate(one)
            if is_held(pod, finalizer):
                content = {"metadata": {"$deleteFromPrimitiveList/finalizers": [finalizer]}}
                await api.patch(f"{path}/{pod.metadata.name}", content, strategic=True)

    async def _accept_existing(self, api: KubernetesApi, request: NodeRequest) -> None:
        """The pod was made by an earlier attempt, or by another worker; one that is already ending is told of by the
        watch.

        Raises:
            NodeRefused: if a pod of this name is not ours.
        """
        found = await api.get(f"{pods_of(request.spec.namespace)}/{request.name}")
        if found is None:
            return
        labels = Pod.model_validate(found).metadata.labels
        if (labels.get(UID), labels.get(INCARNATION)) != (request.node.uid, str(request.node.incarnation)):
            raise NodeRefused(
                f"a pod {request.name} that is not of this job exists in namespace {request.spec.namespace}; "
                "remove it, or give the job another name"
            )


async def _may_create_pods(api: KubernetesApi, namespace: str) -> bool:
    """Whether this worker may create pods in the namespace; everybody may ask for their own rights."""
    attributes = {"namespace": namespace, "verb": "create", "resource": "pods"}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


async def _until_gone(api: KubernetesApi, path: str, name: str, *, or_held_by: str = "") -> None:
    """Returns when the pod is no more, is out of reach, or has ended and is only held by this finalizer."""
    async with contextlib.aclosing(api.follow(path, fields=f"metadata.name={name}")) as changes:
        async for change in changes:
            match change:
                case Listed(()) | Removed():
                    return
                case Listed((pod,)) | Changed(pod) if machine_is_silent(Pod.model_validate(pod)):
                    return
                case Listed((pod,)) | Changed(pod) if is_held(Pod.model_validate(pod), or_held_by):
                    return
                case _:
                    pass


def _refuse(error: KubernetesError, request: NodeRequest) -> NoReturn:
    """Tells what can never succeed from what may."""
    namespace = request.spec.namespace
    if "NamespaceTerminating" in error.causes:
        raise JobRevoked(why_namespace_is_gone(error, namespace)) from error
    if error.status == 404:
        raise NodeRefused(f"namespace {namespace} does not exist; create it, or set `namespace`") from error
    if error.status in (400, 422):
        raise NodeRefused(f"the API server does not take it: {error.message}") from error
    # A quota refuses with 403 as well, and has room again when something else ends.
    if error.status == 403 and "exceeded quota" not in error.message:
        raise NodeRefused(
            f"the API server forbids it: {error.message}; grant the worker this right (docs/kubernetes.md, The worker)"
        ) from error
    raise error
