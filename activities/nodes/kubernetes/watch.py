"""Follows the pods of one group and yields each event once: events of nodes, and the revocation of the whole job.

Pods are deleted for many reasons, one by one. Only if the anchor or the namespace is gone as well did a user delete
the whole job; its pods would otherwise be created again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from perdure.activities.nodes.backend import Fact, Revocation
from perdure.activities.nodes.kubernetes.anchor import Anchors
from perdure.activities.nodes.kubernetes.facts import event_of, is_repeated, processes_ended
from perdure.activities.nodes.kubernetes.naming import GROUP, OURS, ROLE, UID, selector
from perdure.activities.nodes.kubernetes.objects import OwnerReference, Pod
from perdure.activities.nodes.kubernetes.warnings import Warnings
from perdure.base.kubernetes import TRANSIENT, Change, Changed, KubernetesApi, Listed, Removed
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import NodeEvent, NodeEventKind, WatchRequest
from perdure.contract.names import run_name

logger = logging.getLogger(__name__)

_AT_ONCE = 500
"""The most changes that are taken in together."""


def pods_of(namespace: str) -> str:
    """Returns the API path of a namespace's pods."""
    return f"/api/v1/namespaces/{namespace}/pods"


class _PodChanges(NamedTuple):
    """The pods in a change."""

    there: tuple[Pod, ...] = ()
    removed: tuple[Pod, ...] = ()
    whole: bool = False
    """Whether the list is complete: no other pods exist."""


def _pods_of(change: Change) -> _PodChanges:
    match change:
        case Listed(objects):
            return _PodChanges(there=tuple(Pod.model_validate(one) for one in objects), whole=True)
        case Changed(one):
            return _PodChanges(there=(Pod.model_validate(one),))
        case Removed(one):
            return _PodChanges(removed=(Pod.model_validate(one),))


class GroupWatch:
    """Watches a group's pods. It identifies them by UID, since a name may be used again."""

    def __init__(self, api: KubernetesApi, anchors: Anchors, request: WatchRequest) -> None:
        """Creates the watch.

        Args:
            api: the API server to watch.
            anchors: reports whether the job is still desired.
            request: the group. A node that the request knows and that has no pod was deleted while no watch ran.
        """
        self._api = api
        self._anchors = anchors
        self._namespace = request.namespace
        self._labels = f"{selector(OURS)},{UID}={request.uid},{ROLE}={request.role},{GROUP}={request.group}"
        self._anchor = run_name(request.job_id.rpartition("/")[2], request.uid)
        self._expected = {(node.rank, node.incarnation) for node in request.known}
        self._pods: dict[str, Pod] = {}
        self._reported: dict[str, NodeEvent] = {}
        self._revoked = False
        self._warnings = Warnings(api, request.namespace)

    async def batches(self) -> AsyncGenerator[tuple[Fact, ...]]:
        """Yields the current state of all nodes, then every change, until it is closed."""
        changes = self._api.follow(pods_of(self._namespace), labels=self._labels)
        async with contextlib.aclosing(with_pauses(changes, lambda: self._warnings.pause)) as news:
            async for arrived in news:
                if not arrived:
                    read = [self._pods[uid] for uid in await self._warnings.read()]
                    if batch := tuple(event for pod in read for event in self._events_of_present(pod)):
                        yield batch
                    continue
                owner, events = None, list[NodeEvent]()
                for pods in map(_pods_of, arrived):
                    owner = owner or next(self._owners_of_deleted(pods), None)
                    events += self._news(pods)
                if owner and (revocation := await self._revocation(owner)) is not None:
                    self._revoked = True
                    yield (revocation,)
                if events:
                    yield tuple(events)

    async def _revocation(self, owner: OwnerReference) -> Revocation | None:
        """Returns a revocation if the job is no longer desired; checked when pods are deleted, before that is reported,
        once for all whose deletions have arrived."""
        if self._revoked:
            return None
        try:
            reason = await self._anchors.why_gone(self._namespace, owner.name, owner.uid)
        except (KubernetesError, *TRANSIENT) as error:
            logger.info("could not check whether %s is still desired: %s", owner.name, error or type(error).__name__)
            return None
        return Revocation(reason) if reason else None

    def _owners_of_deleted(self, pods: _PodChanges) -> Iterator[OwnerReference]:
        """Yields the owners of pods whose deletion began or completed while their processes ran."""
        deleted = [*pods.removed, *self._absent(pods), *(pod for pod in pods.there if pod.metadata.deletion_timestamp)]
        if pods.whole and self._expected and not pods.there:
            yield OwnerReference(name=self._anchor)
        for pod in deleted:
            known = self._pods.get(pod.metadata.uid)
            old_news = known is not None and (known.metadata.deletion_timestamp or processes_ended(known))
            if not old_news:
                yield from pod.metadata.owner_references

    def _absent(self, pods: _PodChanges) -> list[Pod]:
        """Returns the known pods that are missing from a complete list."""
        present = {pod.metadata.uid for pod in pods.there}
        return [pod for uid, pod in self._pods.items() if uid not in present] if pods.whole else []

    def _news(self, pods: _PodChanges) -> Iterator[NodeEvent]:
        for pod in (*pods.removed, *self._absent(pods)):
            yield from self._events_of_removed(pod)
        for pod in pods.there:
            yield from self._events_of_present(pod)
        if pods.whole:
            yield from self._events_of_missing()

    def _events_of_present(self, pod: Pod) -> Iterator[NodeEvent]:
        uid = pod.metadata.uid
        self._pods[uid] = pod
        event, reported = event_of(pod, warning=self._warnings.see(pod)), self._reported.get(uid)
        if reported is None or not is_repeated(event, reported):
            self._reported[uid] = event
            yield event

    def _events_of_missing(self) -> Iterator[NodeEvent]:
        """Yields the end of expected nodes without a pod. Only the first list is checked: later lists are compared with
        the list before."""
        present = {(event.rank, event.incarnation) for event in self._reported.values()}
        for rank, incarnation in sorted(self._expected - present):
            reason = "its pod was deleted while no watch ran"
            kind, now = NodeEventKind.GONE, datetime.now(UTC)
            yield NodeEvent(kind=kind, rank=rank, incarnation=incarnation, time=now, reason=reason)
        self._expected.clear()

    def _events_of_removed(self, pod: Pod) -> Iterator[NodeEvent]:
        self._pods.pop(pod.metadata.uid, None)
        self._warnings.forget(pod.metadata.uid)
        reported = self._reported.pop(pod.metadata.uid, None)
        event = event_of(pod, removed=True)
        if reported is None or reported.kind is not event.kind:
            yield event


async def with_pauses(
    changes: AsyncGenerator[Change], pause: Callable[[], float | None]
) -> AsyncGenerator[list[Change]]:
    """Yields the changes, those together that have arrived by then, and none of them whenever the seconds have elapsed
    for which the next one is awaited."""
    following = asyncio.ensure_future(anext(changes))
    try:
        while True:
            done, _ = await asyncio.wait([following], timeout=pause())
            if not done:
                yield []
                continue
            arrived: list[Change] = []
            while following.done() and not (arrived and (following.exception() or len(arrived) == _AT_ONCE)):
                try:
                    arrived.append(following.result())
                except StopAsyncIteration:
                    return
                following = asyncio.ensure_future(anext(changes))
                # One that has arrived already is there after a turn of the loop.
                await asyncio.sleep(0)
            yield arrived
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await changes.aclose()
