"""Processes that outlive the command that started them, and that later commands find by their record.

The system may have reused a process ID; together with the process's start time the ID is unique.
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
"""The time from SIGTERM to SIGKILL: the worker lets short activities end, the server closes its database."""


class DaemonRecord(BaseModel, frozen=True):
    """The record of one process, by which it is recognized."""

    pid: int
    created: float
    """The start time, as the operating system reports it."""

    @property
    def process(self) -> psutil.Process | None:
        """The process; None if it has ended, or another process has its ID now."""
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
        """Sends SIGKILL, as a crash would; returns when the process is gone."""
        if process := self.process:
            process.kill()
            _wait(process, timeout=None)

    async def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period; returns when the process is gone."""
        if process := self.process:
            process.terminate()
            if not await asyncio.to_thread(_wait, process, timeout=STOP_GRACE.total_seconds()):
                await asyncio.to_thread(self.kill)


def spawn(
    command: Sequence[str],
    *,
    output: Path,
    folder: Path,
    environment: Mapping[str, str],
    umask: int = -1,
    inherited: Sequence[int] = (),
) -> tuple[int, float]:
    """Starts a process in a session of its own, so that neither Ctrl-C nor a closed terminal reaches it.

    Args:
        command: The program and its arguments.
        output: The file that its output is appended to.
        folder: Its working directory.
        environment: Its environment.
        umask: Its umask; -1 for this process's own.
        inherited: Descriptors that it keeps open.

    Returns:
        Its ID and its start time.
    """
    with os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            umask=umask,
            pass_fds=inherited,
        )
    # This command's exit must not wait for the process, nor warn that it still runs.
    child.returncode = 0
    return child.pid, psutil.Process(child.pid).create_time()


def _wait(process: psutil.Process, *, timeout: float | None) -> bool:
    """Whether the process ended in time; a process that its parent, another command, has not reaped counts as ended."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        # Not `select`, which takes no descriptor above 1,023.
        ending = select.poll()
        ending.register(descriptor, select.POLLIN)
        return bool(ending.poll(None if timeout is None else timeout * 1000))
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
