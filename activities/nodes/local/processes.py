"""Processes that are not children of this one: recognised, awaited and ended without ever hitting another one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from activities.nodes.local.spawn import boot_id, started_ticks

_ROUNDS = 200
"""Of looking for leftovers: a process that forks while it is looked for is found in the next one."""


class ProcessIdentity(BaseModel):
    """One process, told apart from later users of its PID."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: int
    boot: str

    @classmethod
    def read(cls, path: Path) -> ProcessIdentity | None:
        """The identity that a process wrote of itself; None where none did."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None

    @property
    def alive(self) -> bool:
        """Whether this very process runs."""
        return started_ticks(self.pid) == self.started and boot_id() == self.boot

    @contextlib.contextmanager
    def opened(self) -> Generator[int | None]:
        """A pidfd of the process; None where it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # Looked at after opening: now the number cannot change its owner any more.
            yield descriptor if self.alive else None
        finally:
            os.close(descriptor)

    async def gone(self) -> None:
        """Returns as soon as the process has ended."""
        with self.opened() as descriptor:
            if descriptor is not None:
                await _readable(descriptor)

    async def kill(self) -> None:
        """SIGKILL; returns when the process has ended."""
        with self.opened() as descriptor:
            if descriptor is not None:
                await _kill(descriptor)

    async def end(self, *, grace: timedelta) -> None:
        """SIGTERM, the grace, SIGKILL; returns when the process has ended."""
        with self.opened() as descriptor:
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


async def kill_leftovers(node: str) -> int:
    """Ends every process of a node but its agent; returns how many there were, when none is left.

    They are found by their environment: after their launcher's death nothing else connects them.
    """
    killed = 0
    for _ in range(_ROUNDS):
        found = await asyncio.to_thread(lambda: list(_processes_of(node)))
        if not found:
            break
        killed += len(found)
        await asyncio.gather(*(identity.kill() for identity in found))
    return killed


def _processes_of(node: str) -> Iterator[ProcessIdentity]:
    mark = f"PERDURE_NODE={node}".encode()
    boot = boot_id()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            continue
        if mark not in environment or any(variable.startswith(b"PERDURE_AGENT_CONFIG=") for variable in environment):
            continue
        started = started_ticks(int(entry.name))
        if started is not None:
            yield ProcessIdentity(pid=int(entry.name), started=started, boot=boot)
