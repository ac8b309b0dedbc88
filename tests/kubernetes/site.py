"""A whole Perdure for tests whose jobs run in pods: server, worker and client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.client import Client
from perdure.worker import running_worker
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.pods import TestCluster
from tests.support.temporal_server import DevServer, dev_server
from workflows.messages import CreatedNode, NodeRequest


@asynccontextmanager
async def perdure(
    cluster: TestCluster, namespace: str, *, made: Callable[[CreatedNode], Awaitable[None]] | None = None
) -> AsyncIterator[tuple[DevServer, Client]]:
    """A server that pods reach, a worker that makes pods, and a client for one namespace.

    Args:
        cluster: where pods are made.
        namespace: of the client's jobs.
        made: is awaited when a pod was made and its job does not know it yet.
    """
    async with dev_server(options=("--ip", "0.0.0.0")) as server:
        connection = {"TEMPORAL_ADDRESS": f"{API_ADDRESS}:{server.port}", "TEMPORAL_NAMESPACE": server.namespace}
        settings = KubernetesSettings(agent_image=cluster.agent_image, connection=connection)
        backend = _TellingBackend(settings, kubeconfig=cluster.kubeconfig)
        backend.made = made
        async with running_worker(await server.client(), backends=[backend]):
            yield server, Client(address=server.address, namespace=namespace)
        await backend.close()


class _TellingBackend(KubernetesBackend):
    made: Callable[[CreatedNode], Awaitable[None]] | None = None

    async def create(self, request: NodeRequest) -> CreatedNode:
        created = await super().create(request)
        if self.made:
            await self.made(created)
        return created
