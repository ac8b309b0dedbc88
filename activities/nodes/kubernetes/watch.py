"""Follows the pods of one group, and tells each fact once: of nodes, and that the cluster wants the whole job gone.

Pods are deleted for many reasons, one by one. Only where the anchor or the namespace is gone as well is it the job that
a user deleted: its pods would be made again and again, for no purpose.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from activities.nodes.backend import Fact, Revocation
from activities.nodes.kubernetes.anchor import Anchors
from activities.nodes.kubernetes.api import TRANSIENT, Change, Changed, KubernetesApi, KubernetesError, Listed, Removed
from activities.nodes.kubernetes.facts import event_of, is_repeated, processes_ended
from activities.nodes.kubernetes.naming import GROUP, ROLE, UID, run_name
from activities.nodes.kubernetes.objects import OwnerReference, Pod
from workflows.messages import NodeEvent, NodeEventKind, WatchRequest

logger = logging.getLogger(__name__)


def pods_of(namespace: str) -> str:
    """The API's path of a namespace's pods."""
    return f"/api/v1/namespaces/{namespace}/pods"


class _Told(NamedTuple):
    """What a change says of pods."""

    there: tuple[Pod, ...] = ()
    removed: tuple[Pod, ...] = ()
    whole: bool = False
    """There are no others."""


def _pods_of(change: Change) -> _Told:
    match change:
        case Listed(objects):
            return _Told(there=tuple(Pod.model_validate(one) for one in objects), whole=True)
        case Changed(one):
            return _Told(there=(Pod.model_validate(one),))
        case Removed(one):
            return _Told(removed=(Pod.model_validate(one),))


class GroupWatch:
    """What is known of a group's pods, by their UIDs: a name may be used again."""

    def __init__(self, api: KubernetesApi, anchors: Anchors, request: WatchRequest) -> None:
        """Creates the watch.

        Args:
            api: Where it asks.
            anchors: What tells whether the job is still desired.
            request: The group. A node that it knows, and that has no pod any more, was deleted while no watch ran.
        """
        self._api = api
        self._anchors = anchors
        self._namespace = request.namespace
        self._labels = f"{UID}={request.uid},{ROLE}={request.role},{GROUP}={request.group}"
        self._anchor = run_name(request.job_id.rpartition("/")[2], request.uid)
        self._expected = {(node.rank, node.incarnation) for node in request.known}
        self._pods: dict[str, Pod] = {}
        self._told: dict[str, NodeEvent] = {}
        self._revoked = False

    async def batches(self) -> AsyncGenerator[tuple[Fact, ...]]:
        """Everything that is, then everything that happens, for as long as it is iterated."""
        changes = self._api.follow(pods_of(self._namespace), labels=self._labels)
        async with contextlib.aclosing(changes):
            async for change in changes:
                told = _pods_of(change)
                if (revocation := await self._revocation(told)) is not None:
                    self._revoked = True
                    yield (revocation,)
                if batch := tuple(self._news(told)):
                    yield batch

    async def _revocation(self, told: _Told) -> Revocation | None:
        """Whether the job is no longer desired, checked where pods are deleted, before that is reported."""
        owner = next(self._owners_of_deleted(told), None)
        if self._revoked or owner is None:
            return None
        try:
            reason = await self._anchors.why_gone(self._namespace, owner.name, owner.uid)
        except (KubernetesError, *TRANSIENT) as error:
            logger.info("cannot tell whether %s is still desired: %s", owner.name, error or type(error).__name__)
            return None
        return Revocation(reason) if reason else None

    def _owners_of_deleted(self, told: _Told) -> Iterator[OwnerReference]:
        """The owners of pods whose deletion began or completed while their processes ran."""
        deleted = [*told.removed, *self._absent(told), *(pod for pod in told.there if pod.metadata.deletion_timestamp)]
        if told.whole and self._expected and not told.there:
            yield OwnerReference(name=self._anchor)
        for pod in deleted:
            known = self._pods.get(pod.metadata.uid)
            old_news = known is not None and (known.metadata.deletion_timestamp or processes_ended(known))
            if not old_news:
                yield from pod.metadata.owner_references

    def _absent(self, told: _Told) -> list[Pod]:
        """Pods that were known, and are not in a list of all that there are."""
        present = {pod.metadata.uid for pod in told.there}
        return [pod for uid, pod in self._pods.items() if uid not in present] if told.whole else []

    def _news(self, told: _Told) -> Iterator[NodeEvent]:
        for pod in (*told.removed, *self._absent(told)):
            yield from self._removed(pod)
        for pod in told.there:
            yield from self._seen(pod)
        if told.whole:
            yield from self._missed()

    def _seen(self, pod: Pod) -> Iterator[NodeEvent]:
        uid = pod.metadata.uid
        self._pods[uid] = pod
        event, told = event_of(pod), self._told.get(uid)
        if told is None or not is_repeated(event, told):
            self._told[uid] = event
            yield event

    def _missed(self) -> Iterator[NodeEvent]:
        """Only once: what is listed later is compared with what was listed before."""
        present = {(event.rank, event.incarnation) for event in self._told.values()}
        for rank, incarnation in sorted(self._expected - present):
            reason = "its pod was deleted while no watch ran"
            kind, now = NodeEventKind.GONE, datetime.now(UTC)
            yield NodeEvent(kind=kind, rank=rank, incarnation=incarnation, time=now, reason=reason)
        self._expected.clear()

    def _removed(self, pod: Pod) -> Iterator[NodeEvent]:
        self._pods.pop(pod.metadata.uid, None)
        told = self._told.pop(pod.metadata.uid, None)
        event = event_of(pod, removed=True)
        if told is None or told.kind is not event.kind:
            yield event
