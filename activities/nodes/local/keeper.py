"""Operations on one local node. Each is safe to repeat, to run in two workers at once, and to run again after a
crash."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from datetime import timedelta

from perdure.activities.nodes.local import launch
from perdure.activities.nodes.local.folders import Ending, FolderOwner, NodeFolder, NodeFolders, now
from perdure.activities.nodes.local.processes import kill_leftovers
from perdure.contract import NodeRequest

logger = logging.getLogger(__name__)

_AGENT_GRACE = timedelta(seconds=5)
"""Time that an agent has to send its shutdown report and undelivered failures."""


class NodeKeeper:
    """Starts and ends nodes. Methods that are not coroutines block; run them in threads."""

    def __init__(self, folders: NodeFolders, connection: Mapping[str, str]) -> None:
        self._folders = folders
        self._connection = connection

    def create(self, folder: NodeFolder, request: NodeRequest) -> str:
        """Writes the node's files and starts it. Returns the reason if the node has to wait, or an empty string."""
        folder.make()
        with folder.lock():
            record = folder.record or launch.write_configurations(folder, request)
        return self.start(folder, record)

    def start(self, folder: NodeFolder, record: FolderOwner) -> str:
        """Starts a node that never ran. Returns the reason if the node has to wait, or an empty string."""
        with folder.lock():
            if folder.deleted or folder.ended:
                return ""
            if folder.launcher is not None:
                # The watch reports whether it still runs: a launcher is never started twice.
                self._start_agent(folder, record)
                return ""
            with self._admission():
                if waits := self.why_pending():
                    return waits
                launch.finish(
                    launch.start_launcher(folder, record), launch.start_agent(folder, record, self._connection)
                )
        return ""

    def why_pending(self) -> str:
        """Returns why no further node can run now; empty if one can."""
        capacity = self._folders.capacity
        if capacity is None or (running := len(self._folders.running_nodes())) < capacity:
            return ""
        return f"no free slot: {running} of {capacity} in use"

    def restart_agent(self, folder: NodeFolder, record: FolderOwner) -> None:
        """Restarts the agent if it has ended while its launcher runs."""
        with folder.lock():
            launcher = folder.launcher
            if launcher is not None and launcher.alive and not folder.deleted and folder.ended is None:
                self._start_agent(folder, record)

    def _start_agent(self, folder: NodeFolder, record: FolderOwner) -> None:
        if (agent := folder.agent) is not None:
            if agent.alive:
                return
            folder.agent_file.unlink()
        launch.finish(launch.start_agent(folder, record, self._connection))

    def _admission(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._folders.capacity is None else self._folders.admission()

    async def delete(self, folder: NodeFolder, grace: timedelta) -> None:
        """Ends the node and prevents it from ever starting. Its folder stays, with the logs."""
        try:
            # Marked even if nothing was created: a create that comes late must find the mark.
            await asyncio.to_thread(folder.mark_deleted)
        except OSError as error:
            # A full disk must not keep processes running, and a node with a launcher is never started again.
            if folder.launcher is None:
                raise
            logger.error("%s: its deletion cannot be recorded: %s", folder.name, error)
        await asyncio.to_thread(_await_starter, folder)
        if (launcher := folder.launcher) is not None:
            await launcher.end(grace=grace)
        await self.settle(folder)
        await self.end_agent(folder)

    async def settle(self, folder: NodeFolder) -> Ending:
        """Ends the processes that a node without a launcher left behind, and records how it ended."""
        if (record := folder.record) is not None and (
            leftovers := await kill_leftovers(record.mark, run_dir=folder.run_dir)
        ):
            logger.info("%s: ended %d processes that its launcher had left behind", folder.name, leftovers)
        said = folder.launcher_exit
        ending = Ending(
            time=said.time if said else now(),
            reason="deleted" if folder.deleted else said.reason if said else "its launcher was killed",
            exit_code=said.exit_code if said else None,
            signal=said.signal if said else None,
        )
        try:
            return await asyncio.to_thread(folder.mark_ended, ending)
        except OSError as error:
            logger.error("%s: its end cannot be recorded: %s", folder.name, error)
            return ending

    async def end_agent(self, folder: NodeFolder) -> None:
        """Ends the agent after it has sent its shutdown report."""
        if (agent := folder.agent) is not None:
            await agent.end(grace=_AGENT_GRACE)


def _await_starter(folder: NodeFolder) -> None:
    # The process that holds the lock may not have seen the mark.
    with folder.lock():
        pass
