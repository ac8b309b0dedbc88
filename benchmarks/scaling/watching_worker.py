"""A worker that only watches the machines of the cluster of `KUBECONFIG`, so that its memory is that of the watch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from perdure.activities.cluster.activities import watching_clusters
from perdure.activities.nodes.kubernetes.machines import follow
from perdure.activities.nodes.local.backend import LocalBackend
from perdure.activities.nodes.machines import Machines
from perdure.base.kubernetes import KubernetesApi
from perdure.client.connection import connect, find_endpoint
from perdure.contract import SharingPolicy
from perdure.workflows.cluster import Cluster


class _Watched(LocalBackend):
    """The machines of a cluster without the settings that pods need."""

    name = "kubernetes"

    async def machines(self) -> AsyncGenerator[Machines]:
        api = await KubernetesApi.connect()
        try:
            async with contextlib.aclosing(follow(api)) as followed:
                async for found in followed:
                    yield found
        finally:
            await api.close()


async def main() -> None:
    """Runs until it is ended."""
    endpoint = find_endpoint(None)
    client = await connect(endpoint, identity="bench-scaling", patient=True, part="worker")
    worker = Worker(
        client,
        task_queue=endpoint.task_queue,
        workflows=[Cluster],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    sharing = SharingPolicy.THROUGHPUT
    async with worker, watching_clusters(client, [_Watched()], task_queue=endpoint.task_queue, sharing=sharing):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
