"""The local backend: each node is a launcher and an agent, detached from the process that started them.

The folders on disk are the only state; another worker can take over at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from temporalio.client import Client

from perdure.activities.nodes.local import launch, machines, memory, retention
from perdure.activities.nodes.local.folders import NodeFolders, now
from perdure.activities.nodes.local.keeper import NodeKeeper
from perdure.activities.nodes.local.scrape import node_metrics
from perdure.activities.nodes.local.watch import GroupWatch, gone_event, node_event
from perdure.activities.nodes.machines import Machines
from perdure.base.state_folder import default_path
from perdure.contract import CreatedNode, NodeEvent, NodeEventKind, NodeRef, NodeRequest, WatchRequest


class LocalBackend:
    """Nodes as processes on this machine. See `NodeBackend` for what it promises."""

    name = "local"

    def __init__(self, state: Path | None = None, *, connection: Mapping[str, str] | None = None) -> None:
        """Uses a state folder.

        Args:
            state: the folder of the nodes; `PERDURE_STATE` or the user's folder for application state by default.
            connection: Temporal's environment variables for agents; they override the worker's own.
        """
        self._folders = NodeFolders(state or default_path())
        self._keeper = NodeKeeper(self._folders, dict(connection or {}))
        self._watches: set[GroupWatch] = set()

    async def metrics(self) -> tuple[Sequence[bytes], int]:
        """Returns the metrics of this machine's running nodes, and the number of those that did not answer."""
        return await node_metrics(self._folders)

    async def create(self, request: NodeRequest) -> CreatedNode:
        """Starts the node's launcher and agent, unless they were started before."""
        launch.refuse_impossible(request)
        folder = self._folders.folder(request.name)
        pending = await asyncio.to_thread(self._keeper.create, folder, request)
        self._look_again()
        return CreatedNode(
            name=request.name,
            host=socket.gethostname(),
            log_path=str(folder.log),
            pending=pending,
        )

    async def delete(self, *nodes: NodeRef) -> Mapping[str, str]:
        """Ends the nodes' processes. Their folders stay, with the logs."""
        await asyncio.gather(*(self._keeper.delete(self._folders.folder(node.name), node.grace) for node in nodes))
        self._look_again()
        return {}

    async def describe(self, node: NodeRef) -> NodeEvent | None:
        """Returns the node's state, according to its folder and the process table."""
        folder = self._folders.folder(node.name)
        if (record := folder.record) is None:
            return None
        if (ending := folder.ended) is not None:
            return gone_event(record, ending)
        launcher = folder.launcher
        if launcher is None:
            return node_event(record, NodeEventKind.PENDING, time=now(), reason=self._keeper.why_pending())
        if launcher.alive:
            return node_event(record, NodeEventKind.RUNNING, time=now())
        return gone_event(record, await self._keeper.settle(folder))

    async def watch(self, request: WatchRequest) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        """Follows the group's nodes; keeps their agents running and starts those that wait for a slot."""
        watch = GroupWatch(self._keeper, self._folders, request)
        self._watches.add(watch)
        try:
            async with contextlib.aclosing(watch.batches()) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._watches.discard(watch)

    async def machines(self) -> AsyncGenerator[Machines]:
        """Follows this machine and its nodes; see `MonitoredBackend`."""
        async with contextlib.aclosing(machines.follow(self._folders)) as followed:
            async for found in followed:
                yield found

    async def keep_tidy(self, client: Client) -> None:
        """Deletes the folders of jobs that ended long ago, and the memory of killed launchers and agents that were not
        started again. Runs until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(retention.keep_tidy(self._folders, client))
            tasks.create_task(memory.keep_free())

    def _look_again(self) -> None:
        for watch in self._watches:
            watch.look_again()
