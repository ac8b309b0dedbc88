"""The Ray backend: each node is a detached actor, and Ray's tables are the only state.

Ray restarts nothing by itself: the job decides. A machine that is lost has its bundle moved by Ray, and its nodes are
requested again there.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from perdure.activities.nodes.ray.connection import RayConnection
from perdure.activities.nodes.ray.naming import names_of
from perdure.activities.nodes.ray.placement import actor_options, group_of, prefix_of
from perdure.activities.nodes.ray.settings import RaySettings
from perdure.activities.nodes.ray.task import task_of
from perdure.activities.nodes.ray.watch import GroupWatch, event_of
from perdure.contract import CreatedNode, GroupRef, NodeEvent, NodeRef, NodeRequest, WatchRequest, WorkdirRequest
from perdure.contract.names import group_index
from perdure.spec.job import JobSpec
from perdure.spec.ray import has_own_interpreter

_CREATES = 0.25
"""Seconds for each node that is created at the same time: the bridge creates one after the other."""
_BEYOND_GRACE = 15.0
"""Seconds after the grace period that a node has to end its agent and to report its end."""


class RayBackend:
    """Nodes as actors. See `NodeBackend` for what it promises. It cannot promise that no process runs on a machine that
    Ray has lost: `delete` returns once Ray lists the actor no more."""

    name = "ray"

    def __init__(self, settings: RaySettings) -> None:
        """Connects at the first call."""
        self._settings = settings
        self._creating = 0
        """The number of nodes that are being created."""
        self._ray = RayConnection(
            address=settings.address, namespace=settings.namespace, python=settings.python, user=settings.user
        )

    async def create(self, request: NodeRequest) -> CreatedNode:
        """Creates the actor, unless it was created before, and the placement group with its bundle."""
        settings, spec = self._settings, request.spec
        role = spec.roles[request.node.role]
        task = task_of(request, connection=settings.connection, gateway=settings.gateway)
        environment = dict(spec.ray.runtime_env)
        self._creating += 1
        try:
            pending = await self._ray.call(
                "create",
                lasts=self._creating * _CREATES,
                name=request.name,
                options=actor_options(role) | ({"runtime_env": environment} if environment else {}),
                group=group_of(request),
                index=request.node.rank,
                avoid=list(request.avoids),
                archive=task.archive,
                python=role.python or settings.node_python,
                programs=programs_of(spec, request.node.role, node_python=settings.node_python),
                rack_label=spec.ray.rack_label,
                task=task.model_dump(mode="json", exclude_defaults=True),
            )
        finally:
            self._creating -= 1
        return CreatedNode(name=request.name, pending=pending)

    async def delete(self, *nodes: NodeRef) -> Mapping[str, str]:
        """Ends the nodes and their actors. Placement groups that hold no node any more are removed; of nodes that are
        replaced, only those that their replacements do not use."""
        names = [node.name for node in nodes]
        await self._end(names, max(node.grace.total_seconds() for node in nodes))
        prefix = prefix_of(nodes[0].uid)
        if any(node.replaced for node in nodes):
            await self._ray.call("tidy", prefix=prefix)
        else:
            await self._ray.call("release", prefix=prefix, over=any(node.winding_down for node in nodes))
        return {}

    async def clear(self, group: GroupRef) -> None:
        """Ends all nodes of the group, and removes the placement groups that hold none."""
        pattern = names_of(group.job, [group.role], group.uid)
        names = [
            name
            for name in await self._ray.call("names", pattern=pattern)
            if group_index(event_of(pattern, name, {"state": "running"}).rank) == group.group
        ]
        await self._end(names, group.grace.total_seconds())
        await self._ray.call("release", prefix=prefix_of(group.uid), over=True)

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        """Returns the node's state according to its actor; None if it has none."""
        of_role = node.name.removesuffix(f"-{node.rank}-{node.uid}{node.incarnation}")
        pattern = rf"{re.escape(of_role)}-(\d+)-{node.uid}(\d+)"
        found = await self._ray.call("look", pattern=pattern, prefix=prefix_of(node.uid), timeout=0.0)
        return event_of(pattern, node.name, found[node.name]) if node.name in found else None

    async def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        """Follows the group's actors."""
        async with contextlib.aclosing(GroupWatch(self._ray, request).batches()) as batches:
            async for batch in batches:
                yield batch

    async def keep_part(self, request: WorkdirRequest, index: int, content: bytes) -> None:
        """Stores one part of a submission's code in Ray's own tables; see `WorkdirBackend`."""
        part = base64.b64encode(content).decode()
        await self._ray.call("keep_part", archive=request.archive.name, index=index, content=part)

    async def is_adopted(self, request: WorkdirRequest) -> bool:
        """Returns whether a job owns the code."""
        return await self._ray.call("is_adopted", archive=request.archive.name)

    async def remove_archive(self, request: WorkdirRequest) -> None:
        """Deletes the code."""
        await self._ray.call("remove_archive", archive=request.archive.name)

    async def close(self) -> None:
        """Ends the process that talks to Ray."""
        await self._ray.close()

    async def _end(self, names: list[str], grace: float) -> None:
        if not names:
            return
        patience = grace + _BEYOND_GRACE
        await self._ray.call("end", lasts=patience, names=names, grace=patience, reason="deleted")


def programs_of(spec: JobSpec, role: str, *, node_python: str) -> str:
    """Returns the folder in which a node's command finds its programs first; empty: that of the actor's interpreter.

    A runtime environment with an interpreter of its own is for the command, so the site's interpreter for nodes runs
    agent and launcher only.
    """
    python = spec.roles[role].python or ("" if has_own_interpreter(spec.ray.runtime_env) else node_python)
    return str(Path(python).parent) if "/" in python else ""
