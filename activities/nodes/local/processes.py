"""Processes that are not children of this one: identifies, awaits and ends them without ever hitting another
process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from perdure.activities.nodes.local.spawn import boot_id, pid_namespace, started_ticks
from perdure.base.files import read_record
from perdure_launcher.old_ranks import GroupsOfRanks
from perdure_launcher.system.cleaners import Sparing
from perdure_launcher.system.processes import environment_of

_ROUNDS = 200
"""Maximum number of searches for leftover processes: the next search finds a process that forked during one."""
_LOOK_AGAIN = 0.02
"""Seconds between two searches while what is left ends by itself."""


class ProcessIdentity(BaseModel):
    """The identity of one process, distinct from later processes with the same PID."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: int
    boot: str
    namespace: str = ""
    """The namespace of its PID; empty where an earlier release has started it."""

    @classmethod
    def read(cls, path: Path) -> ProcessIdentity | None:
        """Reads the identity that a process wrote about itself; None if none did."""
        return read_record(path, cls)

    @property
    def alive(self) -> bool:
        """Whether this process runs, and not another one with its PID."""
        return self.is_here and started_ticks(self.pid) == self.started

    @property
    def is_here(self) -> bool:
        """Whether it was started since this machine was booted, with PIDs that mean the same here. The PID of another
        machine or container is some other process's here."""
        return self.boot == boot_id() and self.namespace in ("", pid_namespace())

    @contextlib.contextmanager
    def open_pidfd(self) -> Generator[int | None]:
        """Opens a pidfd of the process; None if the process has ended, or is not of this machine."""
        if not self.is_here:
            yield None
            return
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # Checked after opening: the pidfd now refers to one process, even if the PID is used again.
            yield descriptor if self.alive else None
        finally:
            os.close(descriptor)

    async def wait_until_gone(self) -> None:
        """Returns as soon as the process has ended."""
        with self.open_pidfd() as descriptor:
            if descriptor is not None:
                await _readable(descriptor)

    async def kill(self) -> None:
        """Sends SIGKILL. Returns when the process has ended."""
        with self.open_pidfd() as descriptor:
            if descriptor is not None:
                await _kill(descriptor)

    async def end(self, *, grace: timedelta) -> None:
        """Sends SIGTERM, waits for the grace period, sends SIGKILL. Returns when the process has ended."""
        with self.open_pidfd() as descriptor:
            if descriptor is None:
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            try:
                async with asyncio.timeout(grace.total_seconds()):
                    await _readable(descriptor)
                    return
            except TimeoutError:
                pass
            await _kill(descriptor)


async def _kill(descriptor: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    await _readable(descriptor)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.add_reader(descriptor, lambda: done.done() or done.set_result(None))
    try:
        await done
    finally:
        loop.remove_reader(descriptor)


async def kill_leftovers(node: str, *, run_dir: Path) -> int:
    """Ends every process of a node except its agent. Returns their number when none is left.

    After their launcher's death two things connect them: their environment, and the process groups of their ranks. A
    program that overwrites its environment to set its title keeps its group.

    Args:
        node: The node's mark.
        run_dir: Its run directory.
    """
    killed, groups, sparing = 0, await asyncio.to_thread(GroupsOfRanks, run_dir), Sparing()
    for _ in range(_ROUNDS):
        found = await asyncio.to_thread(lambda: {one.pid: one for one in processes_of(node, groups)})
        if not found:
            break
        if not (doomed := await asyncio.to_thread(sparing.choose, found)):
            await asyncio.sleep(_LOOK_AGAIN)
        killed += len(doomed)
        await asyncio.gather(*(found[pid].kill() for pid in doomed))
    return killed


def processes_of(node: str, groups: GroupsOfRanks | None = None) -> Iterator[ProcessIdentity]:
    """Yields the processes of a node except its agent; of these groups also those that name no node."""
    boot, namespace = boot_id(), pid_namespace()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        environment = environment_of(int(entry.name))
        if "PERDURE_AGENT_CONFIG" in environment:
            continue
        found = environment.get("PERDURE_NODE")
        if found != node and (found is not None or groups is None or not groups.have(int(entry.name))):
            continue
        started = started_ticks(int(entry.name))
        if started is not None:
            yield ProcessIdentity(pid=int(entry.name), started=started, boot=boot, namespace=namespace)
