"""A complete Perdure for tests whose jobs run in pods: server, worker and client."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.client.client import Client
from perdure.contract import CreatedNode, NodeRequest
from perdure.worker import running_worker
from scripts.cluster.host_programs import SITE_POLICY
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.pods import TestCluster
from tests.support.temporal_server import DevServer, dev_server
from tests.system.site import Job


@asynccontextmanager
async def perdure(
    cluster: TestCluster,
    namespace: str,
    *,
    made: Callable[[CreatedNode], Awaitable[None]] | None = None,
    kubeconfig: Path | None = None,
    address: str = API_ADDRESS,
    listen: str = "0.0.0.0",
    **settings: Any,
) -> AsyncIterator[tuple[DevServer, Client]]:
    """A server that pods reach, a worker that makes pods, and a client for one namespace.

    Args:
        cluster: where pods are made.
        namespace: of the client's jobs.
        made: is awaited when a pod was made and its job does not know it yet.
        kubeconfig: the worker's; by default one with all rights.
        address: of this machine, as agents know it.
        listen: the address that the server binds.
        settings: others of the backend.
    """
    async with dev_server(options=("--ip", listen)) as server:
        connection = {"TEMPORAL_ADDRESS": f"{address}:{server.port}", "TEMPORAL_NAMESPACE": server.namespace}
        settings = {"policy": SitePolicy.parse(SITE_POLICY), **settings}
        given = KubernetesSettings(agent_image=cluster.agent_image, connection=connection, **settings)
        backend = _TellingBackend(given, kubeconfig=str(kubeconfig or cluster.kubeconfig))
        backend.made = made
        async with running_worker(await server.client(), backends=[backend]):
            yield server, Client(address=server.address, namespace=namespace)
        await backend.close()


async def start(client: Client, worker: dict[str, Any], results: Path, *, name: str = "", **fields: Any) -> Job:
    """Submits a job of pods in the client's namespace.

    Args:
        client: of a running Perdure.
        worker: the role.
        results: where its ranks write, if they do.
        name: of the job; by default one of its own.
        fields: others of the job.
    """
    name = name or f"k-{secrets.token_hex(4)}"
    await client.submit(
        {
            "name": name,
            "namespace": client.namespace,
            "backend": "kubernetes",
            "env": {"OMP_NUM_THREADS": "1"},
            "limits": {"termination_grace_period": "2s"},
            "roles": {"worker": worker},
        }
        | fields
    )
    return Job(client, name, (await client.status(name)).uid, results)


class _TellingBackend(KubernetesBackend):
    made: Callable[[CreatedNode], Awaitable[None]] | None = None

    async def create(self, request: NodeRequest) -> CreatedNode:
        created = await super().create(request)
        if self.made:
            await self.made(created)
        return created
