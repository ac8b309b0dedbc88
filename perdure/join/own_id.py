"""Holds the ID that this machine has in a job, so that a second `perdure join` of the same machine, which would get the
same one, does not take its place: launchers that start one process for each GPU, or for each slot, start several."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Generator
from pathlib import Path

from perdure.base.errors import ExitCode, Refused

_LONGEST_PID = 20
"""Characters."""


class IdInUse(Refused):
    """Another process of this machine has joined the job under the same ID."""

    exit_code = ExitCode.INFRASTRUCTURE


@contextlib.contextmanager
def held(node_id: str, *, job: str, folder: Path) -> Generator[Callable[[], None]]:
    """Holds an ID as long as this process lives, or until the yielded function is called: a process that leaves does
    not keep its successor out.

    Args:
        node_id: The ID.
        job: The job, with its namespace.
        folder: A folder of this machine's user.

    Raises:
        IdInUse: if another process holds it.
    """
    name = hashlib.sha256(f"{job}\n{node_id}".encode()).hexdigest()[:16]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(folder / f"join-{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        # What needs the folder says what it lacks.
        yield lambda: None
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, _LONGEST_PID, 0).decode(errors="replace")
            raise IdInUse(
                f"process {holder} of this machine is in the job {job} as {node_id} already",
                remedy="Name another ID with --node-id to have this machine be several nodes, or end that process.",
            ) from None
        except OSError:
            # A file system without locks.
            yield lambda: None
            return
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield lambda: fcntl.flock(file, fcntl.LOCK_UN)
    finally:
        os.close(file)
