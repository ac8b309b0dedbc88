"""A worker whose backend never reports the loss of a node, so that leases and peers are the only evidence.

Everything else is the product's own: the same workflows, activities and local nodes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator

from perdure.activities.nodes.local.backend import LocalBackend
from perdure.base.services import leave, log_to
from perdure.client.connection import connect, find_endpoint, payload_encryption
from perdure.contract import NodeEvent, NodeEventKind, NodeRef, WatchRequest
from perdure.worker import running_worker


class DeafBackend(LocalBackend):
    """Creates and deletes nodes as usual, and reports each as running until it is deleted."""

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        event = await super().describe(node)
        if event is None or event.kind is not NodeEventKind.GONE:
            return event
        return event.model_copy(update={"kind": NodeEventKind.RUNNING, "reason": "", "exit_code": None, "signal": None})

    async def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        async for batch in super().watch(request):
            if heard := tuple(event for event in batch if event.kind is not NodeEventKind.GONE):
                yield heard


async def serve() -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    endpoint = find_endpoint()
    client = await connect(endpoint, patient=True)
    connection = {"TEMPORAL_ADDRESS": endpoint.address, "TEMPORAL_CONFIG_FILE": os.devnull}
    backend = DeafBackend(connection={**connection, **payload_encryption(endpoint).environment})
    async with running_worker(client, backends=[backend]):
        await stopped.wait()


if __name__ == "__main__":
    log_to(None)
    asyncio.run(serve())
    leave(0)
