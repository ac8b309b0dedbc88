"""Reads the Events of pods that do not start: a missing volume, a network that fails and a claim that cannot be
prepared are in no field of a pod's object."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.activities.nodes.kubernetes.facts import is_unexplained
from perdure.activities.nodes.kubernetes.objects import Pod, PodEvent
from perdure.base.kubernetes import TRANSIENT, KubernetesApi, core_path
from perdure.base.kubernetes_errors import KubernetesError

logger = logging.getLogger(__name__)

FIRST_READ = 4.0
"""Seconds for which a pod has a machine and does not start before its Events are read. Most pods start sooner."""
LONGEST_PAUSE = 30.0
"""Seconds between two readings, which begin with `FIRST_READ` and double: images may take an hour."""
TOGETHER = 1.0
"""Seconds by which a pod's Events are read early, with those of others: pods that are created together are due in turn.
"""
REFUSED_AGAIN = 300.0
"""Seconds after which Events are requested again that may not be read: an API server that starts refuses everything for
a moment."""
FEW = 4
"""Pods whose Events are requested one by one; those of more are found in one list of the namespace's."""


@dataclass
class _Waiting:
    """A pod that does not start."""

    due: float
    """When its Events are to be read."""
    pause: float = FIRST_READ
    warning: PodEvent | None = None


class Warnings:
    """The latest Warning of each pod of a namespace that does not start."""

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        """Reads nothing yet.

        Args:
            api: the API server.
            namespace: of the pods.
        """
        self._api = api
        self._path = core_path(namespace, "events")
        self._waiting: dict[str, _Waiting] = {}
        """By the pod's UID."""
        self._due = math.inf
        """When the first of them is due, or earlier."""
        self._may_read = True
        self._not_before = -math.inf
        """When Events may be requested again."""

    def see(self, pod: Pod) -> PodEvent | None:
        """Returns the latest Event of a pod, as last read, if that is a Warning and the pod still does not start."""
        uid = pod.metadata.uid
        if not is_unexplained(pod):
            self.forget(uid)
            return None
        if uid not in self._waiting:
            self._waiting[uid] = _Waiting(asyncio.get_running_loop().time() + FIRST_READ)
            self._due = min(self._due, self._waiting[uid].due)
        return self._waiting[uid].warning

    def forget(self, uid: str) -> None:
        """Takes in that a pod is gone."""
        self._waiting.pop(uid, None)

    @property
    def pause(self) -> float | None:
        """The seconds until Events are to be read; None where none are."""
        if not self._waiting:
            return None
        return max(0.0, max(self._due, self._not_before) - asyncio.get_running_loop().time())

    async def read(self) -> list[str]:
        """Reads the Events of each pod that is due, or will be in a moment; returns the UIDs of these pods."""
        now = asyncio.get_running_loop().time()
        due = {uid: waiting for uid, waiting in self._waiting.items() if waiting.due <= now + TOGETHER}
        for waiting in due.values():
            waiting.pause = min(2 * waiting.pause, LONGEST_PAUSE)
            waiting.due = now + waiting.pause
        self._due = min((waiting.due for waiting in self._waiting.values()), default=math.inf)
        try:
            found = await self._events(list(due))
        except (KubernetesError, *TRANSIENT) as error:
            if isinstance(error, KubernetesError) and error.unauthorized:
                self._not_before = now + REFUSED_AGAIN
                if self._may_read:
                    logger.warning("%s cannot be read, so Warnings about pods are not shown: %s", self._path, error)
                self._may_read = False
            return []
        self._may_read = True
        latest = {event.involved_object.uid: event for event in sorted(found, key=lambda event: event.time)}
        for uid, waiting in due.items():
            event = latest.get(uid)
            waiting.warning = event if event and event.type == "Warning" else None
        return list(due)

    async def _events(self, uids: Sequence[str]) -> list[PodEvent]:
        of_each = [f"involvedObject.uid={uid}" for uid in uids]
        fields = of_each if len(uids) <= FEW else ["involvedObject.kind=Pod"]
        lists = await asyncio.gather(*(self._api.list(self._path, fields=one, insist=False) for one in fields))
        return [PodEvent.model_validate(event) for events in lists for event in events]
