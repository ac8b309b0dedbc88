"""The node's folder in memory, in which ranks keep snapshots of their state across restarts.

It belongs to the launcher: ranks end with their generation. A launcher that is killed leaves its folder behind,
unlocked; the next launcher of the same user on the machine deletes it.
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
_LOCK = "owner"


class MemoryFolder:
    """A folder that exists for as long as this object's process holds its lock."""

    def __init__(self, root: Path = ROOT) -> None:
        """Creates the folder, and deletes those of launchers that have ended.

        Raises:
            OSError: if the root does not exist or cannot be written.
        """
        delete_abandoned(root)
        # It gets its name when it is locked: other launchers delete unlocked folders.
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.with_name(made.name.removeprefix("."))
        made.rename(self.path)

    def remove(self) -> None:
        """Deletes the folder with all it contains."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def delete_abandoned(root: Path) -> None:
    """Deletes the folders of this user's launchers that were killed."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            logger.info("deletes %s, whose launcher has ended", folder)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
