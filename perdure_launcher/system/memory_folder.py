"""The node's folder in memory, in which ranks keep snapshots of their state across restarts.

It belongs to the launcher: ranks end with their generation. A launcher that is killed leaves its folder behind,
unlocked. The next launcher of the same user on the machine takes it over if it is of the same node of the same job, and
deletes it otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

ROOT = Path("/dev/shm")
"""Linux's tmpfs for shared memory. In a pod it has 64 MiB, or `resources.shm`."""
_PREFIX = "perdure-memory-"
COPIES_PREFIX = "perdure-copies-"
"""The same for what an agent keeps for other nodes."""
_LOCK = "owner"
"""File that the launcher has locked, with the node's name."""
_LONGEST_NODE = 1024


class MemoryFolder:
    """A folder that exists for as long as this object's process holds its lock."""

    def __init__(self, root: Path = ROOT, *, node: str = "", prefix: str = _PREFIX) -> None:
        """Takes over the folder that the node's last launcher left, or creates one; deletes those that other launchers
        left. The same for agents, whose folders have another prefix.

        Args:
            root: The folder in memory for all launchers.
            node: The job's UID with the node's role and rank; empty to take over none.
            prefix: What the folder's name begins with.

        Raises:
            OSError: if the root does not exist or cannot be written.
        """
        if (found := sort_abandoned(root, node=node, prefix=prefix)) is not None:
            self.path, self._lock = found
            return
        # It gets its name when it is locked: other launchers delete unlocked folders.
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._lock, node.encode())
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.with_name(made.name.removeprefix("."))
        made.rename(self.path)

    def remove(self) -> None:
        """Deletes the folder with all it contains."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def sort_abandoned(root: Path, *, node: str = "", prefix: str = _PREFIX) -> tuple[Path, int] | None:
    """Deletes the folders of this user's launchers, or agents, that were killed, except for one of this node.

    Returns:
        The one of this node with its lock, which is held.
    """
    kept: tuple[Path, int] | None = None
    for folder in root.glob(f"{prefix}*"):
        try:
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        if kept is None and node and os.pread(lock, _LONGEST_NODE, 0) == node.encode():
            logger.info("takes over %s, whose process was killed", folder)
            kept = folder, lock
            continue
        logger.info("deletes %s, whose process has ended", folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
    return kept
