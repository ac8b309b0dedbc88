"""The joined backend: it owns no machines, so it creates, ends and observes none.

Creating a node opens a slot that a machine can take. From then on the node reports for itself: its agent does so as
with every backend, and `perdure join`, its parent process, sends the `node_events` that another backend's watch would
send. If a machine is missing, the job waits until its owner brings another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from perdure.contract import CreatedNode, NodeEvent, NodeRef, NodeRequest, WatchRequest


class JoinedBackend:
    """Slots for machines that join by themselves. See `NodeBackend` for what other backends promise."""

    name = "joined"

    async def create(self, request: NodeRequest) -> CreatedNode:
        """Opens the slot, which the job gives to the first machine that requests it."""
        spec = request.spec
        flag = f" --role {request.node.role}" if len(spec.roles) > 1 else ""
        flag += "" if spec.namespace == "default" else f" -n {spec.namespace}"
        return CreatedNode(
            name=request.name, pending=f"waiting for a user to run `perdure join {spec.name}{flag}` on a machine"
        )

    async def delete(self, *nodes: NodeRef) -> Mapping[str, str]:
        """Does nothing: the group has already had the nodes' agents end them."""
        return {}

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        """Returns None: the backend knows nothing that the node did not report itself."""
        return None

    async def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        """Waits until it is cancelled; yields nothing."""
        await asyncio.Event().wait()
        yield ()
