"""The joined backend: it owns no machine, so it makes none, ends none and sees none.

Creating a node opens a place that a machine can take. From then on the node speaks for itself: its agent like any, and
`perdure join`, its parent, in the place of a backend's watch, with the same `node_events`. What only the owner of the
machines can do, to bring another one, is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from workflows.messages import CreatedNode, NodeEvent, NodeRef, NodeRequest, WatchRequest


class JoinedBackend:
    """Places for machines that come by themselves. See `NodeBackend` for what other backends promise."""

    name = "joined"

    async def create(self, request: NodeRequest) -> CreatedNode:
        """Opens the place, which the job gives to the first machine that requests it."""
        spec = request.spec
        flag = "" if spec.namespace == "default" else f" -n {spec.namespace}"
        return CreatedNode(
            name=request.name, pending=f"waiting for a user to run `perdure join {spec.name}{flag}` on a machine"
        )

    async def delete(self, *nodes: NodeRef) -> None:
        """Nothing is left to do: the group has had the nodes' agents end them."""

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        """Nothing is known here that the node did not say itself."""
        return None

    async def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        """Sees nothing, until it is cancelled."""
        await asyncio.Event().wait()
        yield ()
