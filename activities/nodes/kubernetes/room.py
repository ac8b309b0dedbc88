"""The site policy's limits on a namespace: how many nodes and GPUs its jobs have at the same time.

Workers create pods at the same time, so counting pods and then creating one is not enough. Each pod first gets a place
in the namespace's ledger, a ConfigMap that is changed by compare-and-set: of two workers that count the same pods, one
finds the ledger changed and counts again. A place is left once its pod can be counted, or was never created.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from perdure.activities.nodes.backend import NodeNotYet
from perdure.activities.nodes.kubernetes.naming import OURS, RANK, selector
from perdure.activities.nodes.kubernetes.resources import requests_of
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy, matches
from perdure.base.kubernetes import TRANSIENT, KubernetesApi, KubernetesError, Object, core_path
from perdure.base.words import count

LEDGER: Final = "perdure-limits"
"""The ConfigMap with the places of pods that are being created."""
_CREATED_WITHIN: Final = 600.0
"""Seconds after which a place counts as left: longer than a worker tries to create the pod's anchor and the pod. An
activity that is tried again asks for its place again."""


class Room:
    """The places for pods in all namespaces, as one worker gives them out."""

    def __init__(self, api: KubernetesApi, policy: SitePolicy) -> None:
        """Reads nothing yet."""
        self._api = api
        self._policy = policy
        # Pods of one worker would only make each other's changes of the ledger fail.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

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
        except Exception:
            # The same outage may prevent this; the place then ends by its age.
            with contextlib.suppress(KubernetesError, *TRANSIENT):
                async with self._turns[namespace]:
                    await self._leave(namespace, _name(pod))
            raise

    async def _take(self, namespace: str, pod: Mapping[str, Any]) -> str:
        """Returns the limit that leaves no room for the pod; empty if it has its place."""
        name, own = _name(pod), gpus_of(self._policy, pod)
        while True:
            ledger = await self._ledger(namespace)
            # Read after the ledger: a pod whose place was left before is among these.
            listed = await self._api.list(core_path(namespace, "pods"), labels=f"{selector(OURS)},{RANK}")
            places = _open_places(ledger, listed)
            others = [
                *(gpus_of(self._policy, one) for one in listed if not _is_over(one) and _name(one) != name),
                *(place["gpus"] for other, place in places.items() if other != name),
            ]
            if shortage := shortage_of(self._policy, [*others, own]):
                return shortage
            places[name] = {"gpus": own, "at": time.time()}
            if await self._write(namespace, ledger, places):
                return ""

    async def _leave(self, namespace: str, name: str) -> None:
        while True:
            ledger = await self._ledger(namespace)
            if await self._write(namespace, ledger, {one: at for one, at in _places(ledger).items() if one != name}):
                return

    async def _ledger(self, namespace: str) -> Object:
        path = core_path(namespace, "configmaps")
        if found := await self._api.get(f"{path}/{LEDGER}"):
            return found
        metadata = {"name": LEDGER, "labels": {"app.kubernetes.io/part-of": "perdure"}}
        return await self._api.create_or_get(path, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})

    async def _write(self, namespace: str, ledger: Object, places: Mapping[str, Any]) -> bool:
        """Returns whether the ledger is still the one that was read, and now has these places."""
        left = dict.fromkeys(_places(ledger).keys() - places.keys())
        content: Object = {
            "metadata": {"resourceVersion": ledger["metadata"]["resourceVersion"]},
            "data": {**left, **{name: json.dumps(place) for name, place in places.items()}},
        }
        try:
            return await self._api.patch(f"{core_path(namespace, 'configmaps')}/{LEDGER}", content) is not None
        except KubernetesError as error:
            if error.status != 409:
                raise
        return False


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


def _open_places(ledger: Object, pods: Iterable[Object]) -> dict[str, Any]:
    """Returns the places whose pods may still be created."""
    there = {_name(one) for one in pods}
    latest = time.time() - _CREATED_WITHIN
    return {name: place for name, place in _places(ledger).items() if name not in there and place["at"] > latest}


def _places(ledger: Object) -> dict[str, Any]:
    written: Mapping[str, str] = ledger.get("data") or {}
    return {name: json.loads(text) for name, text in written.items()}


def _is_over(pod: Mapping[str, Any]) -> bool:
    """Returns whether a pod has ended and uses no resources any more."""
    status: Mapping[str, Any] = pod.get("status") or {}
    return status.get("phase") in ("Succeeded", "Failed")


def _name(pod: Mapping[str, Any]) -> str:
    return pod["metadata"]["name"]
