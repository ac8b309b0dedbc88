"""Follows the pods of one group, and tells each fact once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from datetime import UTC, datetime

from activities.nodes.kubernetes.api import Change, Changed, KubernetesApi, Listed, Removed
from activities.nodes.kubernetes.facts import event_of
from activities.nodes.kubernetes.objects import Pod
from workflows.messages import KnownNode, NodeEvent, NodeEventKind


class GroupWatch:
    """What is known of a group's pods, by their UIDs: a name may be used again."""

    def __init__(self, api: KubernetesApi, path: str, labels: str, *, known: Iterable[KnownNode] = ()) -> None:
        """Creates the watch.

        Args:
            api: Where it asks.
            path: Of the pods' namespace.
            labels: By which the group's pods are found.
            known: Incarnations that had a pod before: one that has none any more was deleted while nobody watched.
        """
        self._api = api
        self._path = path
        self._labels = labels
        self._expected = {(node.rank, node.incarnation) for node in known}
        self._pods: dict[str, Pod] = {}
        self._told: dict[str, NodeEvent] = {}

    async def batches(self) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        """Everything that is, then everything that happens, for as long as it is iterated."""
        async with contextlib.aclosing(self._api.follow(self._path, labels=self._labels)) as changes:
            async for change in changes:
                if batch := tuple(self._news(change)):
                    yield batch

    def _news(self, change: Change) -> Iterator[NodeEvent]:
        match change:
            case Listed(objects):
                pods = [Pod.model_validate(one) for one in objects]
                present = {pod.metadata.uid for pod in pods}
                for known in list(self._pods.values()):
                    if known.metadata.uid not in present:
                        yield from self._removed(known)
                for pod in pods:
                    yield from self._seen(pod)
                yield from self._missed()
            case Changed(one):
                yield from self._seen(Pod.model_validate(one))
            case Removed(one):
                yield from self._removed(Pod.model_validate(one))

    def _seen(self, pod: Pod) -> Iterator[NodeEvent]:
        uid = pod.metadata.uid
        self._pods[uid] = pod
        event, told = event_of(pod), self._told.get(uid)
        if told is None or (told.kind, told.reason) != (event.kind, event.reason):
            self._told[uid] = event
            yield event

    def _missed(self) -> Iterator[NodeEvent]:
        """Only once: what is listed later is compared with what was listed before."""
        present = {(event.rank, event.incarnation) for event in self._told.values()}
        for rank, incarnation in sorted(self._expected - present):
            reason = "its pod was deleted while nobody watched"
            kind, now = NodeEventKind.GONE, datetime.now(UTC)
            yield NodeEvent(kind=kind, rank=rank, incarnation=incarnation, time=now, reason=reason)
        self._expected.clear()

    def _removed(self, pod: Pod) -> Iterator[NodeEvent]:
        self._pods.pop(pod.metadata.uid, None)
        told = self._told.pop(pod.metadata.uid, None)
        event = event_of(pod, removed=True)
        if told is None or told.kind is not event.kind:
            yield event
