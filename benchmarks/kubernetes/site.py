"""The benchmark's environment: the machine's own cluster, with a Temporal server and a worker beside it."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.recovery.processes import TrialFailed
from perdure.base.errors import PerdureError
from perdure.base.kubernetes import KubernetesApi
from perdure.base.state_folder import StateFolder
from perdure.client.client import Client
from perdure.local.control_plane import LocalControlPlane, PodSite
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY
from scripts.cluster.machine import API_ADDRESS

from .gateway import GatewaySwitch

KWOK = "kwok.x-k8s.io/node"
"""The taint of simulated machines."""
POLICY = f"{SITE_POLICY}tolerations: [{KWOK}]\n"
"""The site policy of the benchmarks' pods."""

Found = TypeVar("Found")

CANCEL_SECONDS = 60.0
"""Seconds for a job to end by itself; its remaining pods are then deleted."""


class BenchmarkApi(KubernetesApi):
    """The API client, with calls that only the benchmark needs."""

    async def count(self, path: str, *, fields: str = "") -> int:
        """Counts the objects of a collection without fetching them; with `fields`, reports whether one matches."""
        query = {"limit": "1"} | ({"fieldSelector": fields} if fields else {})
        found = await self._request("GET", path, query=query)
        return len(found["items"]) + found["metadata"].get("remainingItemCount", 0)

    async def set_spec(self, path: str, **fields: Any) -> None:
        """Changes fields of an object's spec, regardless of concurrent changes."""
        thing = await self._request("GET", path)
        thing["spec"] |= fields
        del thing["metadata"]["resourceVersion"]
        await self._request("PUT", path, content=thing)


@dataclass(frozen=True)
class Site:
    """A cluster, a control plane, and a namespace for the jobs."""

    cluster: Cluster
    pods: PodSite
    api: BenchmarkApi
    control_plane: LocalControlPlane
    client: Client
    namespace: str
    gateway: GatewaySwitch

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def address(self) -> str:
        """The address of the Temporal server, for this machine and for pods."""
        return self.client.endpoint.address

    @property
    def worker(self) -> psutil.Process:
        return _alive(self.control_plane.status().worker)

    @property
    def server(self) -> psutil.Process:
        return _alive(self.control_plane.status().server)

    async def pod_count(self) -> int:
        """Counts the pods of the namespace, at little cost for the API server."""
        return await self.api.count(self.pods_path)

    async def end(self, job: str) -> None:
        """Cancels a job and waits until its pods are gone."""
        with suppress(PerdureError, TimeoutError):
            await self.client.cancel(job)
            async with asyncio.timeout(CANCEL_SECONDS):
                await self.client.wait(job)

    async def clear(self) -> None:
        """Deletes all pods of the namespace, regardless of their creator."""
        await self.api.delete(self.pods_path, grace=0)
        await eventually(
            lambda: _none_left(self), seconds=CANCEL_SECONDS, otherwise="pods of the last measurement stayed"
        )


@asynccontextmanager
async def site(report: Callable[[str], None]) -> AsyncGenerator[Site]:
    """Provides the site, and removes it when the context closes, except for a cluster that ran before."""
    # The state folder contains sockets, whose paths are limited to 108 bytes.
    with Cluster().use(report) as cluster, tempfile.TemporaryDirectory(prefix="pb-") as folder:
        policy = Path(folder) / "site-policy.yaml"
        policy.write_text(POLICY)
        pods = PodSite(
            kubeconfig=cluster.kubeconfig,
            agent_image=cluster.load_perdure_image().reference,
            site_policy=policy,
            ip=API_ADDRESS,
        )
        control_plane = LocalControlPlane(StateFolder(Path(folder) / "state"), pods=pods)
        api = await BenchmarkApi.connect(str(cluster.kubeconfig))
        gateway = GatewaySwitch(control_plane, api, cluster.kubeconfig, Path(folder))
        namespace = f"bench-{secrets.token_hex(3)}"
        try:
            await api.create("/api/v1/namespaces", _namespace(namespace))
            accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
            await eventually(
                lambda: api.get(f"{accounts}/default"), seconds=60, otherwise="the namespace has no service account"
            )
            endpoint = await control_plane.ensure()
            async with Client(endpoint=endpoint, namespace=namespace) as client:
                yield Site(cluster, pods, api, control_plane, client, namespace, gateway)
        finally:
            async with AsyncExitStack() as ends:
                # The server and the worker are processes of their own: they end although the cluster does not answer.
                ends.push_async_callback(control_plane.stop_server)
                ends.push_async_callback(control_plane.stop_worker)
                ends.push_async_callback(api.close)
                ends.push_async_callback(api.delete, f"/api/v1/namespaces/{namespace}")
                ends.push_async_callback(gateway.close)


async def eventually(
    look: Callable[[], Awaitable[Found | None]], *, seconds: float, otherwise: str, pause: float = 0.05
) -> Found:
    """Polls until there is a result.

    Args:
        look: Queries once.
        seconds: The time limit.
        otherwise: The message of the error.
        pause: Seconds between two queries.

    Raises:
        TrialFailed: with `otherwise`, if there is no result within the limit.
    """
    deadline = time.monotonic() + seconds
    while not (found := await look()):
        if time.monotonic() > deadline:
            raise TrialFailed(f"{otherwise} within {seconds:.0f} s")
        await asyncio.sleep(pause)
    return found


async def _none_left(where: Site) -> bool:
    return await where.pod_count() == 0


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def _alive(record: Any) -> psutil.Process:
    process = record.process if record else None
    if process is None:
        raise TrialFailed("the worker or the Temporal server has ended")
    return process
