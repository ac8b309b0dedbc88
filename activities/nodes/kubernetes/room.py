"""The site policy's limits on a namespace: how many nodes and GPUs its jobs have at the same time.

Workers create pods at the same time, so counting pods and then creating one is not enough. Each pod first gets a place
in the namespace's ledger, a ConfigMap that is changed by compare-and-set: of two workers that count the same pods, one
finds the ledger changed and counts again.

A list of all pods for each creation would cost a job of a thousand nodes gigabytes. So a worker lists them once for all
that it creates within some seconds, and counts those of its list with the places of pods that have been created since.
A place therefore stays in the ledger for longer than any list is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perdure.activities.nodes.backend import NodeNotYet
from perdure.activities.nodes.kubernetes.naming import OURS, RANK, selector
from perdure.activities.nodes.kubernetes.resources import requests_of
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy, matches
from perdure.base.kubernetes import TRANSIENT, KubernetesApi, Object, core_path
from perdure.base.kubernetes_errors import KubernetesError
from perdure.base.words import count

logger = logging.getLogger(__name__)

LEDGER: Final = "perdure-limits"
"""The ConfigMap with the places of pods that are being created, or were lately."""
_CREATED_WITHIN: Final = 600.0
"""Seconds after which a place counts as left whose pod nobody is known to have created: longer than a worker tries to
create the pod's anchor and the pod. An activity that is tried again asks for its place again."""
_LIST_LASTS: Final = 10.0
"""Seconds for which a list of the pods is used. It may count pods that are gone: none is refused without a new one."""
_CLOCKS_DIFFER: Final = 30.0
"""The most, in seconds, that the clocks of two workers are taken to differ."""
_KEPT: Final = 2 * (_LIST_LASTS + _CLOCKS_DIFFER)
"""Seconds for which the place of a pod that was created is kept."""


class _Place(BaseModel):
    """The place of one pod, as the ledger has it as JSON."""

    model_config = ConfigDict(frozen=True)

    gpus: int = Field(ge=0)
    at: float
    """When it was taken, by the worker's clock."""
    made: float | None = None
    """When its pod was created, by the same clock; None where nobody is known to have created it."""


@dataclass(frozen=True)
class _Known:
    """What a worker knows of a namespace."""

    ledger: Object
    """As it was last read or written."""
    pods: Mapping[str, int]
    """The GPUs of each pod that has not ended, as they were listed."""
    listed_at: float
    """By this machine's clock."""


class Room:
    """The places for pods in all namespaces, as one worker gives them out."""

    def __init__(self, api: KubernetesApi, policy: SitePolicy) -> None:
        """Reads nothing yet."""
        self._api = api
        self._policy = policy
        # Pods of one worker would only make each other's changes of the ledger fail.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._known: dict[str, _Known] = {}
        self._made: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """When this worker has created pods lately, by namespace and name; the ledger may not tell that yet."""

    @contextlib.asynccontextmanager
    async def place_for(self, namespace: str, pod: Mapping[str, Any]) -> AsyncGenerator[None]:
        """Holds a place for a pod, which is created in this context; leaves it if that fails.

        Raises:
            NodeNotYet: if other pods must go first.
            KubernetesError: if the API server does not answer, or refuses.
        """
        if self._policy.max_nodes is None and self._policy.max_gpus is None:
            yield
            return
        async with self._turns[namespace]:
            shortage = await self._take(namespace, pod)
        if shortage:
            raise NodeNotYet(f"with it, the jobs in the namespace {namespace} have {shortage}")
        try:
            yield
        except Exception as error:
            if isinstance(error, KubernetesError) and error.reason == "AlreadyExists":
                await self._tell_made(namespace, _name(pod))
                raise
            # The same outage may prevent this; the place then ends by its age.
            with contextlib.suppress(KubernetesError, *TRANSIENT):
                async with self._turns[namespace]:
                    await self._change(namespace, {_name(pod): None})
            raise
        await self._tell_made(namespace, _name(pod))

    async def _take(self, namespace: str, pod: Mapping[str, Any]) -> str:
        """Returns the limit that leaves no room for the pod; empty if it has its place."""
        name, own = _name(pod), gpus_of(self._policy, pod)
        known = self._known.get(namespace)
        if fresh := known is None or not 0 <= time.time() - known.listed_at < _LIST_LASTS:
            known = await self._read(namespace)
        while True:
            others = self._counted(namespace, known)
            others.pop(name, None)
            if shortage := shortage_of(self._policy, [*others.values(), own]):
                if fresh:
                    return shortage
                known, fresh = await self._read(namespace), True
            elif await self._write(namespace, known, {name: _Place(gpus=own, at=time.time())}):
                return ""
            else:
                known = await self._read_ledger(namespace, known)

    def _counted(self, namespace: str, known: _Known) -> dict[str, int]:
        """Returns the GPUs of all pods that there are or may be, by name."""
        counted, made = dict(known.pods), self._made[namespace]
        for name, place in _places(known.ledger).items():
            if name in made:
                unlisted = made[name] >= known.listed_at
            elif place.made is not None:
                unlisted = place.made >= known.listed_at - _CLOCKS_DIFFER
            else:
                unlisted = place.at > time.time() - _CREATED_WITHIN
            if unlisted:
                counted[name] = place.gpus
        return counted

    async def _tell_made(self, namespace: str, name: str) -> None:
        """Has the ledger say that a pod was created: with the next place, or now if no other pod waits for one."""
        self._made[namespace][name] = time.time()
        turn = self._turns[namespace]
        if turn.locked():
            return
        # Until it is told, others take the pod for one that may still be created.
        with contextlib.suppress(KubernetesError, *TRANSIENT):
            async with turn:
                await self._change(namespace, {})

    async def _change(self, namespace: str, places: Mapping[str, _Place | None]) -> None:
        known = self._known[namespace]
        while not await self._write(namespace, known, places):
            known = await self._read_ledger(namespace, known)

    async def _read(self, namespace: str) -> _Known:
        ledger = await self._ledger(namespace)
        # Read after the ledger: a pod whose place was left before is among these.
        at = time.time()
        listed = await self._api.list(core_path(namespace, "pods"), labels=f"{selector(OURS)},{RANK}")
        pods = {_name(one): gpus_of(self._policy, one) for one in listed if not _is_over(one)}
        known = self._known[namespace] = _Known(ledger, pods, at)
        return known

    async def _read_ledger(self, namespace: str, known: _Known) -> _Known:
        known = self._known[namespace] = replace(known, ledger=await self._ledger(namespace))
        return known

    async def _ledger(self, namespace: str) -> Object:
        path = core_path(namespace, "configmaps")
        if found := await self._api.get(f"{path}/{LEDGER}"):
            return found
        metadata = {"name": LEDGER, "labels": {"app.kubernetes.io/part-of": "perdure"}}
        return await self._api.create_or_get(path, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})

    async def _write(self, namespace: str, known: _Known, places: Mapping[str, _Place | None]) -> bool:
        """Changes places, and with them those of pods that were created since or long ago. Returns whether the ledger
        is still the one that is known."""
        now, made = time.time(), self._made[namespace]
        current = _places(known.ledger)
        told = {name: current[name].model_copy(update={"made": at}) for name, at in made.items() if name in current}
        ended = dict.fromkeys(_data(known.ledger).keys() - current.keys()) | {
            name: None
            for name, place in current.items()
            if now > made.get(name, place.at + _CREATED_WITHIN - _KEPT if place.made is None else place.made) + _KEPT
        }
        changed = {**told, **ended, **places}
        content: Object = {
            "metadata": {"resourceVersion": known.ledger["metadata"]["resourceVersion"]},
            "data": {name: place and place.model_dump_json(exclude_none=True) for name, place in changed.items()},
        }
        try:
            written = await self._api.patch(f"{core_path(namespace, 'configmaps')}/{LEDGER}", content)
        except KubernetesError as error:
            if error.status != 409:
                raise
            return False
        if written is None:
            return False
        self._known[namespace] = replace(known, ledger=written)
        for name in [*(made.keys() & ended.keys()), *(name for name in made if name not in current)]:
            if name not in places:
                del made[name]
        return True


def shortage_of(policy: SitePolicy, gpus: Sequence[int]) -> str:
    """Returns the first limit that nodes of one namespace with so many GPUs each exceed together; empty if they exceed
    none."""
    if policy.max_nodes is not None and len(gpus) > policy.max_nodes:
        return f"{count(len(gpus), 'node')}, and the site's policy allows {policy.max_nodes} (max_nodes)"
    if policy.max_gpus is not None and sum(gpus) > policy.max_gpus:
        return f"{count(sum(gpus), 'GPU')}, and the site's policy allows {policy.max_gpus} (max_gpus)"
    return ""


def gpus_of(policy: SitePolicy, pod: Mapping[str, Any]) -> int:
    """Counts the accelerators of a pod, as its scheduler does: with those of sidecars, and of init containers where
    they need more."""
    counted = (
        count
        for name, count in requests_of(pod["spec"]).items()
        if _is_device(name) and matches(policy.gpu_resources, name)
    )
    return int(sum(counted, Decimal(0)))


def _is_device(name: str) -> bool:
    """Whether a resource is one of a device plugin, or of a class of devices; Kubernetes' own have no domain, or one of
    its own."""
    domain, _, _ = name.rpartition("/")
    return domain.startswith("deviceclass.") or (bool(domain) and not domain.endswith("kubernetes.io"))


def _data(ledger: Object) -> Mapping[str, str]:
    return ledger.get("data") or {}


def _places(ledger: Object) -> dict[str, _Place]:
    """Returns the places that can be read. What else users of the namespace write there holds none, and is deleted:
    each pod that there is counts by the list."""
    places: dict[str, _Place] = {}
    for name, text in _data(ledger).items():
        try:
            places[name] = _Place.model_validate_json(text)
        except ValidationError as error:
            logger.warning("ConfigMap %s: %s is no place of a pod, and is deleted: %s", LEDGER, name, error)
    return places


def _is_over(pod: Mapping[str, Any]) -> bool:
    """Returns whether a pod has ended and uses no resources any more."""
    status: Mapping[str, Any] = pod.get("status") or {}
    return status.get("phase") in ("Succeeded", "Failed")


def _name(pod: Mapping[str, Any]) -> str:
    return pod["metadata"]["name"]
