"""The node's folder in memory, in which ranks keep snapshots of their state across restarts.

It belongs to the launcher: ranks end with their generation. A launcher that is killed leaves its folder behind,
unlocked. The next launcher of the same user on the machine takes it over if it is of the same node of the same job.
Launchers of other nodes, which may start before that one, leave it where it is for a while, and delete it afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

from perdure_training.snapshots.arena import Arena

logger = logging.getLogger(__name__)

ROOT = Path("/dev/shm")
"""Linux's tmpfs for shared memory. In a pod it has 64 MiB, or `resources.shm`."""
MEMORY_PREFIX = "perdure-memory-"
COPIES_PREFIX = "perdure-copies-"
"""The same for what an agent keeps for other nodes."""
KEPT_FOR = timedelta(minutes=10)
"""Time for which an abandoned folder waits for its node to be started again: that may have to wait for a free slot, or
for the pauses after failures. It is counted from when a launcher first finds the folder abandoned."""
_RELEASED_WITHIN = timedelta(seconds=3)
"""Time for which a launcher waits for a folder of its own node that is locked: the kernel gives up the lock of a killed
process last, after its memory, and another launcher locks a folder while it looks at it."""
_LOOK = timedelta(milliseconds=20)
DELETE_INTERVAL = timedelta(minutes=1)
"""Interval of searches for folders that were abandoned for long: no other launcher may start on the machine."""
_LOCK = "owner"
"""File that the launcher has locked, with the node's name."""
_ABANDONED = "abandoned"
"""File whose time of change is when a launcher first found the folder abandoned, by the machine's monotonic clock: one
that is set to another time must not cost a node its snapshots. A full memory has room for an empty file only."""
_LONGEST_NODE = 1024


class MemoryOrigin(StrEnum):
    """Where a launcher's memory folder comes from. Ranks report it when a snapshot is missing."""

    ADOPTED = "adopted"
    """The node's last launcher on this machine left it."""
    NEW = "new"
    """It was created empty: no launcher of the node had left one on this machine."""
    HELD = "held"
    """It was created empty: another process still had the one of the node's last launcher."""


class MemoryFolder:
    """A folder that exists for as long as this object's process holds its lock."""

    def __init__(self, root: Path = ROOT, *, node: str = "", prefix: str = MEMORY_PREFIX) -> None:
        """Takes over the folder that the node's last launcher left, or creates one. The same for agents, whose folders
        have another prefix.

        Args:
            root: The folder in memory for all launchers.
            node: The job's UID with the node's role and rank; empty to take over none.
            prefix: What the folder's name begins with.

        Raises:
            OSError: if the root does not exist or cannot be written.
        """
        self._node = node
        left, held = _take(root, node=node, prefix=prefix) if node else ([], False)
        if left:
            found = max(left, key=lambda one: one.newest_snapshot)
            # The owner before last left the others, when it was locked out of its predecessor's.
            for other in left:
                if other is not found:
                    other.delete()
            logger.info("takes over %s, whose process was killed", found.path)
            (found.path / _ABANDONED).unlink(missing_ok=True)
            self.path, self._lock, self.origin = found.path, found.lock, MemoryOrigin.ADOPTED
            return
        self.origin = MemoryOrigin.HELD if held else MemoryOrigin.NEW
        # It gets its name when it is locked: other launchers delete unlocked folders.
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        self._lock = _locked(made, node)
        self.path = made.with_name(made.name.removeprefix("."))
        made.rename(self.path)

    def renew(self) -> None:
        """Makes the folder again where something else has deleted it, as systemd does with a user's shared memory at
        the last logout (`RemoveIPC`), and locks what a rank has made again. What was in it is lost; what is saved from
        now on is not.

        Raises:
            OSError: if it cannot be created.
        """
        if os.fstat(self._lock).st_nlink:
            return
        self.path.mkdir(mode=0o700, exist_ok=True)
        lock, gone = _locked(self.path, self._node), self._lock
        self._lock = lock
        os.close(gone)
        logger.warning("%s was deleted with all snapshots of this node, and is made again", self.path)

    def remove(self) -> None:
        """Deletes the folder with all it contains."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def delete_abandoned(
    root: Path = ROOT, *, node: str = "", prefix: str = MEMORY_PREFIX, kept_for: timedelta = KEPT_FOR
) -> None:
    """Deletes the folders of this user's launchers, or agents, that were killed and not started again for long.

    Those of other jobs are deleted at once where a node needs the memory, since more than half of it is in use.

    Args:
        root: The folder in memory for all launchers.
        node: The caller's own node; empty for a caller that needs no memory.
        prefix: What the folders' names begin with.
        kept_for: The time for which a folder is kept after it was first found abandoned.
    """
    for path, descriptor in _folders(root, prefix):
        folder = _lock(path, descriptor)
        if folder is None:
            continue
        age = folder.abandoned_for()
        is_spared = not node or _job(folder.node) == _job(node) or not _is_short(root)
        if age < kept_for.total_seconds() and is_spared:
            os.close(folder.lock)
            continue
        logger.info("deletes %s, whose process ended at least %.0f s ago", path, age)
        folder.delete()


def _locked(folder: Path, node: str) -> int:
    """Locks a folder for this process; returns the descriptor that holds the lock."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.write(lock, node.encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@dataclass(frozen=True)
class _Abandoned:
    """A folder whose owner was killed, locked by this process."""

    path: Path
    lock: int
    node: str

    @property
    def newest_snapshot(self) -> tuple[int, int]:
        """Generation and step of the newest snapshot."""
        arenas = (Arena(folder) for folder in self.path.glob("stage-*/*") if folder.is_dir())
        versions = ((header.generation, header.step) for arena in arenas for _, header in arena.snapshots())
        return max(versions, default=(-1, -1))

    def abandoned_for(self) -> float:
        """Returns the seconds since a launcher first found it abandoned; that may be now."""
        mark, now = self.path / _ABANDONED, time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            # A later one is of an older release, or of a container with another clock.
            if (since := mark.lstat().st_mtime) <= now:
                return now - since
        try:
            mark.touch(mode=0o600)
            os.utime(mark, (now, now), follow_symlinks=False)
        except OSError:
            # A folder without room for an empty file is of no use to its node.
            return float("inf")
        return 0.0

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _take(root: Path, *, node: str, prefix: str) -> tuple[list[_Abandoned], bool]:
    """Locks the folders that launchers of a node have left.

    Returns:
        The folders, and whether another process still has one.
    """
    until = time.monotonic() + _RELEASED_WITHIN.total_seconds()
    taken: list[_Abandoned] = []
    while True:
        held = False
        for path, descriptor in _folders(root, prefix):
            if any(path == one.path for one in taken) or _read_node(descriptor) != node:
                os.close(descriptor)
            elif (folder := _lock(path, descriptor)) is not None:
                taken.append(folder)
            else:
                held = held or path.exists()
        if not held or time.monotonic() >= until:
            return taken, held
        time.sleep(_LOOK.total_seconds())


def _folders(root: Path, prefix: str) -> Iterator[tuple[Path, int]]:
    """The folders of this user's launchers, or agents, each with its lock file opened."""
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                yield path, os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def _lock(path: Path, descriptor: int) -> _Abandoned | None:
    """Locks a folder; None, with the file closed, if another process has it, or has just deleted it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return _Abandoned(path, descriptor, _read_node(descriptor))
    except OSError:
        pass
    os.close(descriptor)
    return None


def _read_node(descriptor: int) -> str:
    return os.pread(descriptor, _LONGEST_NODE, 0).decode(errors="replace")


def _job(node: str) -> str:
    return node.partition("/")[0]


def _is_short(root: Path) -> bool:
    usage = shutil.disk_usage(root)
    return usage.free * 2 < usage.total
