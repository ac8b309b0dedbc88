"""Processes that remove what others have left in /dev/shm, once those have ended.

Python's resource tracker and torch's `torch_shm_manager` do that for a rank and the workers of its loaders, also where
these were killed. To kill them together with the rank leaves its shared memory behind for good: the next rank
cannot create a segment of the same name, and each restart takes more of the machine's memory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable

from . import processes

_PATIENCE = 4.0
"""Seconds that they have after the end of all others, unless another process needs them. The tracker takes
milliseconds, and torch's manager waits 2 s for others."""
_ROUNDS = 5
"""Maximum number of searches for members of a group: a process may have been forking."""
_TRACKER = "resource_tracker import main"
_MANAGER = "torch_shm_manager"


def is_manager(pid: int) -> bool:
    """Returns whether the process is torch's. It is not waited for: no new process uses the names that it removes."""
    return os.path.basename(next(iter(processes.command_of(pid)), "")) == _MANAGER


def is_cleaner(pid: int) -> bool:
    """Returns whether the process is one of them."""
    return is_manager(pid) or any(_TRACKER in word for word in processes.command_of(pid))


def without_cleaners(pids: Iterable[int]) -> list[int]:
    """Returns the processes that do not end by themselves once the others have."""
    return [pid for pid in pids if not is_cleaner(pid)]


class Sparing:
    """Lets processes be killed in the order in which they leave nothing behind."""

    def __init__(self) -> None:
        self._alone_since: float | None = None

    def choose(self, pids: Collection[int]) -> list[int]:
        """Returns which of the processes that are to be killed, and still run, are killed now: cleaners only once they
        were alone for a while."""
        others, now = without_cleaners(pids), time.monotonic()
        if others or self._alone_since is None:
            self._alone_since = None if others else now
            return others
        return list(pids) if now - self._alone_since >= _PATIENCE else []


def kill_group(leader: int) -> None:
    """Kills a process that has not been reaped, and its process group but for the cleaners."""
    processes.send([leader], signal.SIGKILL)
    for _ in range(_ROUNDS):
        members = [found.pid for found in processes.all_processes() if found.group == leader and not found.zombie]
        if not (doomed := without_cleaners(members)):
            return
        processes.send(doomed, signal.SIGKILL)
