"""Processes that outlive the command that started them, found again by what was written down about them.

A process ID alone may have been given to another process since; with the time at which its process began it has not.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import psutil
from pydantic import BaseModel

STOP_GRACE = timedelta(seconds=15)
"""From SIGTERM to SIGKILL: the worker lets short activities end, the server closes its database."""


class DaemonRecord(BaseModel, frozen=True):
    """One process, recognisable."""

    pid: int
    created: float
    """As the operating system counts it."""

    @property
    def process(self) -> psutil.Process | None:
        """The process; None where it has ended, or its ID is another's now."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created) < 0.05
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    @property
    def alive(self) -> bool:
        return self.process is not None

    def kill(self) -> None:
        """SIGKILL, as a crash would; returns when it is gone."""
        if process := self.process:
            process.kill()
            _wait(process, timeout=None)

    async def stop(self) -> None:
        """SIGTERM, the grace, SIGKILL; returns when it is gone."""
        if process := self.process:
            process.terminate()
            if not await asyncio.to_thread(_wait, process, timeout=STOP_GRACE.total_seconds()):
                await asyncio.to_thread(self.kill)


def spawn(command: Sequence[str], *, output: Path, folder: Path, environment: Mapping[str, str]) -> tuple[int, float]:
    """Starts a process in a session of its own, so that neither Ctrl-C nor a closed terminal reaches it.

    Returns:
        Its ID, and the time at which it began.
    """
    with output.open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
        )
    # Our own exit must not wait for it, nor warn that it still runs.
    child.returncode = 0
    return child.pid, psutil.Process(child.pid).create_time()


def _wait(process: psutil.Process, *, timeout: float | None) -> bool:
    """Whether the process ended in time; also where its parent, another command of ours, has not reaped it."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        ended, _, _ = select.select([descriptor], [], [], timeout)
        return bool(ended)
    finally:
        os.close(descriptor)


def tail(path: Path, *, lines: int = 20) -> str:
    """The last lines of a log, for an error message."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""
