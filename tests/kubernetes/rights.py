"""The rights that the chart grants to its parts, on a real cluster, for parts that run in a test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from perdure.base.kubernetes import KubernetesApi
from scripts.cluster.cluster import Cluster
from tests.kubernetes.chart import rendered

_GROUPS = ("rbac.authorization.k8s.io/v1", "admissionregistration.k8s.io/v1")
_OF_CLUSTER = ("Cluster", "Mutating", "Validating")
"""The kinds that are in no namespace begin with one of these."""


class Rights:
    """The rights of one release."""

    def __init__(self, cluster: Cluster, site: str, objects: Sequence[dict[str, Any]]) -> None:
        self._cluster = cluster
        self._site = site
        self._objects = objects

    def kubeconfig(self, part: str) -> Path:
        """Returns the kubeconfig of a part, such as `worker`: the API server knows its service account by name."""
        return self._cluster.kubeconfig_of(f"system:serviceaccount:{self._site}:perdure-{part}")

    def granted(self, part: str) -> set[Right]:
        """Returns each right of a part, in namespaces and in the cluster."""
        rules = [
            rule
            for thing in self._objects
            if thing["kind"] in ("Role", "ClusterRole")
            and thing["metadata"]["labels"]["app.kubernetes.io/component"] == part
            and not any("aggregate-to" in label for label in thing["metadata"]["labels"])
            for rule in thing["rules"]
        ]
        return {
            Right(group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }


class Right(NamedTuple):
    """What a request takes, as RBAC names it."""

    group: str
    resource: str
    verb: str


_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


def right_for(method: str, path: str, query: Mapping[str, str]) -> Right:
    """Returns the right that a request of the API takes."""
    kind, *parts = path.strip("/").split("/")
    group, parts = ("", parts[1:]) if kind == "api" else (parts[0], parts[2:])
    if parts[0] == "namespaces" and len(parts) > 2:
        parts = parts[2:]
    resource, named = "/".join([parts[0], *parts[2:]]), len(parts) > 1
    if method == "GET":
        return Right(group, resource, "get" if named else "watch" if "watch" in query else "list")
    return Right(group, resource, _VERBS[method])


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, kubeconfigs: str) -> Iterator[set[Right]]:
    """Yields the rights that requests take, as they are made, of clients that were made meanwhile.

    Args:
        monkeypatch: puts the client's method back.
        kubeconfigs: part of the paths of these clients' kubeconfigs.
    """
    used: set[Right] = set()
    send, connect = KubernetesApi._send, KubernetesApi.connect
    ours: set[KubernetesApi] = set()

    async def connect_noted(kubeconfig: str | None = None, *, part: str = "perdure") -> KubernetesApi:
        api = await connect(kubeconfig, part=part)
        if kubeconfig and kubeconfigs in kubeconfig:
            ours.add(api)
        return api

    async def send_noted(
        self: KubernetesApi, method: str, path: str, query: Mapping[str, str], *rest: Any, **more: Any
    ):
        if self in ours:
            used.add(right_for(method, path, query))
        return await send(self, method, path, query, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(KubernetesApi, "connect", connect_noted)
        patched.setattr(KubernetesApi, "_send", send_noted)
        yield used


@asynccontextmanager
async def chart_rights(
    helm: Path, cluster: Cluster, api: KubernetesApi, *namespaces: str, site: str = "", **values: Any
) -> AsyncIterator[Rights]:
    """Creates the roles, bindings and admission policies of a release, and nothing else of it.

    Args:
        helm: the program.
        cluster: the cluster.
        api: an administrator's client.
        namespaces: where its jobs run.
        site: the release's namespace, which need not exist; by default one of its own for the first namespace.
        values: others of the chart.
    """
    site = site or f"site-{namespaces[0]}"
    objects = [
        thing
        for thing in await rendered(helm, site=site, jobNamespaces=list(namespaces), **values)
        if thing["apiVersion"] in _GROUPS
        and (thing["kind"].startswith(_OF_CLUSTER) or thing["metadata"].get("namespace", site) in namespaces)
    ]
    paths = [(_collection(thing, site), thing) for thing in objects]
    try:
        for path, thing in paths:
            await api.create(path, thing)
        yield Rights(cluster, site, objects)
    finally:
        for path, thing in reversed(paths):
            await api.delete(f"{path}/{thing['metadata']['name']}")


def _collection(thing: dict[str, Any], site: str) -> str:
    kind = thing["kind"].lower()
    plural = f"{kind.removesuffix('y')}ies" if kind.endswith("policy") else f"{kind}s"
    of_cluster = thing["kind"].startswith(_OF_CLUSTER)
    place = "" if of_cluster else f"/namespaces/{thing['metadata'].get('namespace', site)}"
    return f"/apis/{thing['apiVersion']}{place}/{plural}"
