"""Watches the local nodes of one group: the kernel reports at once when a launcher or an agent ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

from perdure.activities.nodes.local.folders import Ending, FolderOwner, NodeFolder, NodeFolders, now
from perdure.activities.nodes.local.keeper import NodeKeeper
from perdure.activities.nodes.local.launch import agent_backoff
from perdure.activities.nodes.local.processes import ProcessIdentity
from perdure.contract import NodeEvent, NodeEventKind, WatchRequest, identity_of
from perdure.contract.names import group_index

logger = logging.getLogger(__name__)

_LOOK_AGAIN = 1.0
"""Seconds between two searches for nodes that another worker created, and for free slots."""


def node_event(record: FolderOwner, kind: NodeEventKind, *, time: datetime, reason: str = "") -> NodeEvent:
    """Returns an event of the node of a record."""
    return NodeEvent(**identity_of(record), kind=kind, time=time, reason=reason)


def gone_event(record: FolderOwner, ending: Ending) -> NodeEvent:
    """Returns the event that the node has ended, with how it ended."""
    return node_event(record, NodeEventKind.GONE, time=ending.time.astimezone(UTC), reason=ending.reason)


class GroupWatch:
    """One watch: follows each node of the group in a task of its own."""

    def __init__(self, keeper: NodeKeeper, folders: NodeFolders, request: WatchRequest) -> None:
        self._keeper = keeper
        self._folders = folders
        self._request = request
        self._events: asyncio.Queue[NodeEvent] = asyncio.Queue()
        self._following: dict[str, asyncio.Task[None]] = {}
        self._look = asyncio.Event()

    def look_again(self) -> None:
        """Wakes all waiting tasks, after a node was created or has ended."""
        self._look.set()
        self._look = asyncio.Event()

    async def batches(self) -> AsyncGenerator[tuple[NodeEvent, ...]]:
        """Yields the current state of all nodes, then every change, until it is closed."""
        discovering = asyncio.create_task(self._discover())
        try:
            while True:
                batch = [await self._events.get()]
                while not self._events.empty():
                    batch.append(self._events.get_nowait())
                yield tuple(batch)
        finally:
            tasks = [discovering, *self._following.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _discover(self) -> None:
        while True:
            try:
                for folder in self._folders.of_job(self._request.uid, self._request.role):
                    if folder.name not in self._following and (record := folder.record) is not None:
                        self._follow(folder, record)
            except OSError as error:
                logger.error("the nodes of this machine cannot be listed, retrying: %s", error)
            await self._pause()

    def _follow(self, folder: NodeFolder, record: FolderOwner) -> None:
        if record.role == self._request.role and group_index(record.rank) == self._request.group:
            self._following[folder.name] = asyncio.create_task(self._follow_on(folder, record))

    async def _follow_on(self, folder: NodeFolder, record: FolderOwner) -> None:
        """Follows one node from its current state to its end."""
        while True:
            try:
                await self._until_gone(folder, record)
                return
            except Exception:
                logger.exception("%s: watching the node failed, retrying", folder.name)
                await asyncio.sleep(_LOOK_AGAIN)

    async def _until_gone(self, folder: NodeFolder, record: FolderOwner) -> None:
        launcher = await self._until_started(folder, record)
        if launcher is not None:
            self._tell(node_event(record, NodeEventKind.RUNNING, time=now()))
            keeping = asyncio.create_task(self._keep_agent(folder, record))
            try:
                await launcher.wait_until_gone()
            finally:
                keeping.cancel()
                await asyncio.wait((keeping,))
        ending = folder.ended or await self._keeper.settle(folder)
        self._tell(gone_event(record, ending))
        self.look_again()
        await self._keeper.end_agent(folder)

    async def _until_started(self, folder: NodeFolder, record: FolderOwner) -> ProcessIdentity | None:
        """Returns the launcher as soon as it has started; None if the node has ended."""
        reported = ""
        while folder.ended is None:
            if (launcher := folder.launcher) is not None:
                return launcher
            waits = await asyncio.to_thread(self._keeper.start, folder, record)
            if folder.launcher is not None:
                continue
            if waits and waits != reported:
                self._tell(node_event(record, NodeEventKind.PENDING, time=now(), reason=waits))
                reported = waits
            await self._pause()
        return None

    async def _keep_agent(self, folder: NodeFolder, record: FolderOwner) -> None:
        """Restarts the agent whenever it ends while its launcher runs, as a kubelet does with a sidecar."""
        loop = asyncio.get_running_loop()
        backoff = agent_backoff()
        while True:
            began = loop.time()
            try:
                if (agent := folder.agent) is not None:
                    await agent.wait_until_gone()
                await asyncio.sleep(backoff.next_pause(ran=loop.time() - began))
                logger.warning("%s: its agent has ended and is restarted", folder.name)
                await asyncio.to_thread(self._keeper.restart_agent, folder, record)
            except Exception:
                logger.exception("%s: its agent cannot be started, which is tried again", folder.name)
                await asyncio.sleep(_LOOK_AGAIN)

    def _tell(self, event: NodeEvent) -> None:
        self._events.put_nowait(event)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AGAIN):
                await self._look.wait()
