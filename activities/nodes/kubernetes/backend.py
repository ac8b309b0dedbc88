"""The Kubernetes backend: each node is a pod. The API server's objects are the only state.

If the API server finds a pod wrong by itself, the backend refuses it for good, with the server's message. Permissions,
admission rules and quotas change while jobs run, so their refusals, like every other failure, are retried: here for
seconds and by Temporal after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from pydantic import JsonValue
from temporalio.client import Client

from perdure.activities.nodes.backend import Fact, JobRevoked, NodeNotYet, NodeRefused, RemovalDenied
from perdure.activities.nodes.kubernetes import collocation, leftovers, machines, placement, resize, workdir
from perdure.activities.nodes.kubernetes.admission import alterations, is_of_others, keep_findable
from perdure.activities.nodes.kubernetes.anchor import Anchors, shows_end_of_namespace, why_namespace_is_gone
from perdure.activities.nodes.kubernetes.deletion import labels_of, leave, until_gone
from perdure.activities.nodes.kubernetes.facts import event_of, is_held
from perdure.activities.nodes.kubernetes.naming import (
    GROUP,
    INCARNATION,
    OURS,
    ROLE,
    UID,
    selector,
)
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.activities.nodes.kubernetes.pod import BEYOND_GRACE, pod_of
from perdure.activities.nodes.kubernetes.presets import Additions, find_presets, with_preset
from perdure.activities.nodes.kubernetes.room import Room, gpus_of, shortage_of
from perdure.activities.nodes.kubernetes.service import service_of
from perdure.activities.nodes.kubernetes.settings import KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import violation_of_namespace
from perdure.activities.nodes.kubernetes.watch import GroupWatch, pods_of
from perdure.activities.nodes.machines import Machines
from perdure.activities.runtime import PresetRefused
from perdure.base.kubernetes import KubernetesApi
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import (
    CreatedNode,
    GroupRef,
    NodeEvent,
    NodeRef,
    NodeRequest,
    NodeResize,
    WatchRequest,
    WorkdirRequest,
)

logger = logging.getLogger(__name__)


class KubernetesBackend:
    """Nodes as pods. See `NodeBackend` for what it promises. It cannot promise that no process runs on a machine that
    does not answer: `delete` returns once the API server has marked the pod there for deletion."""

    name = "kubernetes"

    def __init__(self, settings: KubernetesSettings, *, kubeconfig: str | None = None) -> None:
        """Connects at the first call.

        Args:
            settings: the site's settings.
            kubeconfig: path of a kubeconfig; else `KUBECONFIG`, the pod's own service account, or the user's file.
        """
        self._settings = settings
        self._kubeconfig = kubeconfig
        self._at_once = asyncio.Semaphore(settings.creates_at_once)
        self._connecting = asyncio.Lock()
        self._connected: tuple[KubernetesApi, Anchors] | None = None
        self._additions: Additions
        self._room: Room

    async def create(self, request: NodeRequest) -> CreatedNode:
        """Creates the pod, unless it was created before."""
        api, anchors = await self._connection()
        altered = ""
        async with self._at_once:
            pod: dict[str, Any] = {}
            try:
                # First of all: nothing is made or read in a namespace that the site's policy does not allow.
                pod = await self._pod(request)
                self._refuse_too_large(request, pod)
                others = await self._await_turn(api, request)
                if not self._settings.gangs.may_differ(request):
                    placement.stay_alike(pod["spec"], others)
                if siblings := collocation.siblings(request):
                    found = await api.list(pods_of(request.spec.namespace), labels=siblings)
                    pods = [Pod.model_validate(one) for one in found]
                    collocation.share_machine(pod, request, pods, self._settings.gangs)
                async with self._room.place_for(request.spec.namespace, pod):
                    shared = (*service_of(request), *self._settings.gangs.shared_objects(request, pod))
                    pod["metadata"]["ownerReferences"] = [await anchors.owner_reference(request, shared)]
                    made = await api.create(pods_of(request.spec.namespace), pod)
                await keep_findable(api, pod, made)
                altered = alterations(pod, made)
            except KubernetesError as error:
                if error.reason == "AlreadyExists":
                    await self._accept_existing(api, request)
                elif error.unauthorized and (reason := await why_namespace_is_gone(api, error, request.spec.namespace)):
                    raise JobRevoked(reason) from error
                elif error.invalid and is_of_others(error, pod):
                    raise NodeNotYet(
                        "a LimitRange or an admission webhook of the cluster gives its pod a value that is invalid: "
                        f"{error.message}",
                        queued=False,
                    ) from error
                else:
                    refuse(error, request)
        if altered:
            logger.warning("%s: %s", request.name, altered)
        return CreatedNode(name=request.name, altered=altered)

    async def delete(self, *nodes: NodeRef) -> Mapping[str, str]:
        """Deletes the pods and waits until none of them is left but by others; see `until_gone`. With the last pod of a
        job, the job's anchor is deleted, too."""
        api, anchors = await self._connection()
        finalizer = self._settings.gangs.finalizer
        namespace, uid = nodes[0].namespace, nodes[0].uid
        left: dict[str, str] = {}
        async with _denials(api, namespace):
            pods = await _own_pods(api, nodes)
            ending = [node for node in nodes if node.name in pods]
            await asyncio.gather(*(self._end(api, node, pods[node.name]) for node in ending))
            left = await until_gone(api, ending)
            if finalizer:
                given_up = [node for node in nodes if not node.replaced]
                await asyncio.gather(*(self._release(api, node, finalizer) for node in given_up))
                held = {node.name for node in given_up}
                left = {name: text for name, text in left.items() if name not in held}
                left |= await until_gone(api, given_up)
            if nodes[0].winding_down:
                await _remove_anchor(api, anchors, namespace, uid)
        return left

    async def clear(self, group: GroupRef) -> None:
        """Deletes all pods with the group's labels, and the job's anchor together with the job's last pod."""
        api, anchors = await self._connection()
        labels = f"{selector(OURS)},{UID}={group.uid},{ROLE}={group.role},{GROUP}={group.group}"
        async with _denials(api, group.namespace):
            found = [Pod.model_validate(one) for one in await api.list(pods_of(group.namespace), labels=labels)]
            if found:
                logger.warning("%d pods of %s/%s were left behind", len(found), group.uid, group.role)
                await self.delete(*(_ref(pod, group) for pod in found))
            await _remove_anchor(api, anchors, group.namespace, group.uid)

    async def keep_tidy(self, client: Client) -> None:
        """Deletes the anchors of closed jobs, and with them all their remaining objects. Runs until it is cancelled."""
        api, _ = await self._connection()
        await leftovers.keep_tidy(api, client)

    async def _end(self, api: KubernetesApi, node: NodeRef, pod: Pod) -> None:
        """Requests the pod's deletion."""
        grace = int(node.grace.total_seconds()) + BEYOND_GRACE
        path = f"{pods_of(node.namespace)}/{node.name}"
        async with self._at_once:
            await leave(api, path, pod)
            await api.delete(path, grace=grace, uid=pod.metadata.uid)

    async def resize(self, node: NodeResize) -> str:
        """Raises the memory of the pod's training container in place; see `ResizingBackend`."""
        api, _ = await self._connection()
        pod = (await _own_pods(api, [node])).get(node.name)
        if pod is None:
            return "its pod is gone"
        if self._settings.gangs.counts_requests:
            return "its queue counts what a pod requested when it was admitted"
        return await resize.resize(api, node, pod)

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        """Returns the node's state according to its pod's object; None if the node has no pod."""
        api, _ = await self._connection()
        pod = (await _own_pods(api, [node])).get(node.name)
        return None if pod is None else event_of(pod)

    async def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[Fact, ...]]:
        """Follows the group's pods with one list and one watch."""
        api, anchors = await self._connection()
        watch = GroupWatch(api, anchors, request)
        async with contextlib.aclosing(watch.batches()) as batches:
            async for batch in batches:
                yield batch

    async def machines(self) -> AsyncGenerator[Machines]:
        """Follows all machines of the cluster and the pods on them; see `MonitoredBackend`."""
        api, _ = await self._connection()
        async with contextlib.aclosing(machines.follow(api)) as followed:
            async for found in followed:
                yield found

    async def keep_part(self, request: WorkdirRequest, index: int, content: bytes) -> None:
        """Stores one part of a submission's code; see `WorkdirBackend`."""
        if refused := violation_of_namespace(self._settings.policy, request.namespace):
            raise NodeRefused(str(refused))
        api, _ = await self._connection()
        await workdir.keep_part(api, request, index, content)

    async def is_adopted(self, request: WorkdirRequest) -> bool:
        """Returns whether a job owns the code."""
        api, _ = await self._connection()
        return await workdir.is_adopted(api, request.namespace, request.archive)

    async def remove_archive(self, request: WorkdirRequest) -> None:
        """Deletes the code."""
        api, _ = await self._connection()
        await workdir.remove(api, request.namespace, request.archive)

    def policy(self) -> dict[str, JsonValue]:
        """Returns the site policy; see `PolicyBackend`."""
        return self._settings.policy.model_dump(mode="json")

    async def with_preset(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merges a specification over the preset that it names; see `PresetBackend`."""
        api, _ = await self._connection()
        try:
            presets = await find_presets(api, self._settings.presets_namespace)
        except KubernetesError as error:
            if error.denied:
                raise PresetRefused(f"runtime: the API server forbids reading presets: {error.message}") from error
            raise
        return with_preset(data, presets)

    async def close(self) -> None:
        """Closes the connections to the API server."""
        if self._connected is not None:
            await self._connected[0].close()
            self._connected = None

    async def _connection(self) -> tuple[KubernetesApi, Anchors]:
        async with self._connecting:
            if self._connected is None:
                api = await KubernetesApi.connect(self._kubeconfig, part="perdure-worker")
                self._connected = (api, Anchors(api))
                self._additions = Additions(api, self._settings.presets_namespace)
                self._room = Room(api, self._settings.policy)
            return self._connected

    async def _pod(self, request: NodeRequest) -> dict[str, Any]:
        """Returns the node's manifest, under the site's policy and what the job's preset may add to it.

        Raises:
            NodeRefused: if the policy does not allow it.
        """
        settings, preset = self._settings, request.spec.runtime
        try:
            return pod_of(request, settings)
        except NodeRefused as refused:
            if preset is None or violation_of_namespace(settings.policy, request.spec.namespace):
                raise
            try:
                granted = await self._additions.additions_for(preset, request.spec.namespace)
            except PresetRefused as wrong:
                raise NodeRefused(f"{refused}; {wrong}") from wrong
            if granted.withheld:
                raise NodeRefused(f"{refused}; {granted.withheld}") from refused
            if granted.addition is None:
                raise
        return pod_of(request, replace(settings, policy=settings.policy.with_addition(granted.addition)))

    def _refuse_too_large(self, request: NodeRequest, pod: Mapping[str, Any]) -> None:
        """Does nothing where the site's policy has room for the job in an empty namespace.

        Raises:
            NodeRefused: if the job alone is too large.
        """
        role = request.spec.roles[request.node.role]
        policy = self._settings.policy
        try:
            gpus = gpus_of(policy, pod)
        except ValueError as error:
            raise NodeRefused(
                f"roles.{request.node.role}: a resource has no quantity of Kubernetes: {error}"
            ) from error
        if shortage := shortage_of(policy, [gpus] * role.nodes.min):
            raise NodeRefused(f"roles.{request.node.role}.nodes: the job needs {shortage}")

    async def _await_turn(self, api: KubernetesApi, request: NodeRequest) -> Sequence[Pod]:
        """Checks that the pod may be created now; returns the pods by which the gang system decides that.

        Raises:
            NodeNotYet: if other pods must be created or end first.
        """
        gangs, node = self._settings.gangs, request.node
        ranks = gangs.needs(request)
        if not ranks:
            return ()
        found = await api.list(pods_of(request.spec.namespace), labels=labels_of(node.uid, node.role, ranks))
        pods = [Pod.model_validate(one) for one in found]
        if obstacle := gangs.obstacle(request, pods):
            raise NodeNotYet(obstacle)
        return pods

    async def _release(self, api: KubernetesApi, node: NodeRef, finalizer: str) -> None:
        """Removes the finalizer from the node's ended pods: of this incarnation, and of those that it was to
        replace."""
        path = pods_of(node.namespace)
        for one in await api.list(path, labels=labels_of(node.uid, node.role, [node.rank])):
            pod = Pod.model_validate(one)
            if is_held(pod, finalizer):
                content = {"metadata": {"$deleteFromPrimitiveList/finalizers": [finalizer]}}
                await api.patch(f"{path}/{pod.metadata.name}", content, strategic=True)

    async def _accept_existing(self, api: KubernetesApi, request: NodeRequest) -> None:
        """Accepts a pod that an earlier attempt or another worker created. If that pod is already ending, the watch
        reports it.

        Raises:
            NodeRefused: if a pod of this name does not belong to the job.
        """
        found = await api.get(f"{pods_of(request.spec.namespace)}/{request.name}")
        if found is None:
            return
        labels = Pod.model_validate(found).metadata.labels
        if (labels.get(UID), labels.get(INCARNATION)) != (request.node.uid, str(request.node.incarnation)):
            raise NodeRefused(
                f"a pod {request.name} that does not belong to this job exists in namespace {request.spec.namespace}; "
                "remove it, or give the job another name"
            )


async def _own_pods(api: KubernetesApi, nodes: Sequence[NodeRef]) -> dict[str, Pod]:
    """Returns the existing pods of nodes of one group, by name.

    A request may name any pod of the namespace, so the pods are found by the labels that the worker gave them.
    """
    first, requested = nodes[0], {(node.name, node.rank, node.incarnation) for node in nodes}
    labels = labels_of(first.uid, first.role, {node.rank for node in nodes})
    pods = [Pod.model_validate(one) for one in await api.list(pods_of(first.namespace), labels=labels)]
    return {pod.metadata.name: pod for pod in pods if (pod.metadata.name, pod.rank, pod.incarnation) in requested}


def _ref(pod: Pod, group: GroupRef) -> NodeRef:
    return NodeRef(
        name=pod.metadata.name,
        uid=group.uid,
        role=group.role,
        rank=pod.rank,
        incarnation=pod.incarnation,
        backend=group.backend,
        namespace=group.namespace,
        grace=group.grace,
        winding_down=True,
    )


async def _remove_anchor(api: KubernetesApi, anchors: Anchors, namespace: str, uid: str) -> None:
    """Deletes a job's anchor unless the job has pods that are not being deleted."""
    pods = [
        Pod.model_validate(one) for one in await api.list(pods_of(namespace), labels=f"{selector(OURS)},{UID}={uid}")
    ]
    if all(pod.metadata.deletion_timestamp for pod in pods):
        await anchors.remove(namespace, uid)


@contextlib.asynccontextmanager
async def _denials(api: KubernetesApi, namespace: str) -> AsyncGenerator[None]:
    """Turns denials of the API server into `RemovalDenied`. A namespace that is being deleted takes along what is
    left."""
    try:
        yield
    except KubernetesError as error:
        if not error.denied:
            raise
        if gone := await why_namespace_is_gone(api, error, namespace):
            logger.warning("%s: %s", gone, error)
            return
        raise RemovalDenied(f"the API server forbids removing objects in namespace {namespace}: {error}") from error


def refuse(error: KubernetesError, request: NodeRequest) -> NoReturn:
    """Raises the error that says whether the request can ever succeed.

    Raises:
        NodeRefused: if only another request can succeed.
        NodeNotYet: if it can succeed once there is capacity, or someone has changed a rule, a permission or an object
            that it names.
        JobRevoked: if the whole job is no longer desired.
        KubernetesError: if the cause is unknown.
    """
    namespace = request.spec.namespace
    if "NamespaceTerminating" in error.causes:
        raise JobRevoked(shows_end_of_namespace(error, namespace)) from error
    if error.status == 404:
        raise NodeRefused(f"namespace {namespace} does not exist; create it, or set `namespace`") from error
    if error.invalid:
        raise NodeRefused(f"the API server rejects it: {error.message}") from error
    if error.quota_exceeded:
        raise NodeNotYet(_quota(error.message)) from error
    if _NO_ACCOUNT in error.message:
        raise NodeNotYet(f"its service account does not exist: {error.message}", queued=False) from error
    if error.denied:
        remedy = (
            "grant the worker this right (docs/kubernetes.md, The worker)"
            if error.unauthorized and 'User "' in error.message
            else "change the rule that forbids it, or the job"
        )
        raise NodeNotYet(f"the API server forbids it: {error.message}; {remedy}", queued=False) from error
    raise error


_NO_ACCOUNT = "error looking up service account"


def _quota(message: str) -> str:
    """Returns a message for users. It leaves out the used amounts, which change all the time."""
    found = re.search(r"exceeded quota: (.+?), requested: (.+?), used: .+?, limited: (.+)", message)
    if found is None:
        return f"its namespace's quota is used up: {message}"
    name, requested, limited = found.groups()
    return f"its namespace's quota {name} is used up: it requests {requested}, and the limit is {limited}"
