"""A whole Perdure for tests whose jobs run in pods: server, worker and client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from perdure.client import Client
from perdure.worker import running_worker
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.pods import TestCluster
from tests.support.temporal_server import DevServer, dev_server


@asynccontextmanager
async def perdure(cluster: TestCluster, namespace: str) -> AsyncIterator[tuple[DevServer, Client]]:
    """A server that pods reach, a worker that makes pods, and a client for one namespace."""
    async with dev_server(options=("--ip", "0.0.0.0")) as server:
        connection = {"TEMPORAL_ADDRESS": f"{API_ADDRESS}:{server.port}", "TEMPORAL_NAMESPACE": server.namespace}
        backend = cluster.backend(connection=connection)
        async with running_worker(await server.client(), backends=[backend]):
            yield server, Client(address=server.address, namespace=namespace)
        await backend.close()
