"""The newest step that each rank has made, saved or not, and the newest that all ranks had in memory.

What is done again after a restore can be counted by the first, and what is lost is known by the second.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from pathlib import Path

logger = logging.getLogger(__name__)

_LAYOUT = struct.Struct("<QQ")
"""Generation and step."""
_COMPLETE_AT = _LAYOUT.size
"""Where those of the newest complete step are. A file of an older release has none."""
_SIZE = 2 * _LAYOUT.size


class MadeSteps:
    """One rank's file in the node's memory folder. It costs no system call to write a step."""

    def __init__(self, folder: Path, rank: int, *, generation: int) -> None:
        """Opens the file; `write` sets its first step. Without room for it, the next world does not know the steps."""
        self._generation = generation
        self._newest = -1
        self._went_back = False
        try:
            self._map = _map(folder, rank)
        except OSError:
            self._map = mmap.mmap(-1, _SIZE)

    def write(self, step: int) -> str:
        """Records that the rank has made a step, or continues from it.

        Returns:
            Why the step must not be saved; empty if it may be. A restart continues with the highest step, so a lower
            one would be saved in vain: a script that trains several models begins again with small numbers, and so
            does one that does not count on from the step that it has restored.
        """
        if step >= self._newest:
            self._newest = step
            _LAYOUT.pack_into(self._map, 0, self._generation, step)
            return ""
        problem = (
            f"steps below {self._newest} are not saved, since a restart continues with that one. Count on from there, "
            "or give each training a Checkpointer of its own, with another name"
        )
        if not self._went_back:
            self._went_back = True
            logger.warning("perdure: step %s: %s", step, problem)
        return problem

    def write_complete(self, step: int) -> None:
        """Records a step that all ranks have, or with which all of them have begun; 0 where they have loaded none."""
        _LAYOUT.pack_into(self._map, _COMPLETE_AT, self._generation, step)


def _map(folder: Path, rank: int) -> mmap.mmap:
    descriptor = os.open(folder / f"rank-{rank}.made", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # A hole in a full tmpfs would end the process with SIGBUS.
        if (size := os.fstat(descriptor).st_size) < _SIZE:
            os.pwrite(descriptor, bytes(_SIZE - size), size)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def newest_made(folder: Path) -> tuple[int, int] | None:
    """Returns the newest generation of which a rank has made steps on this node, and the newest one of these steps."""
    return _newest(folder, at=0)


def newest_complete(folder: Path) -> tuple[int, int] | None:
    """Returns the newest generation of which this node knows a step that all ranks had, and the newest one of these."""
    return _newest(folder, at=_COMPLETE_AT)


def _newest(folder: Path, *, at: int) -> tuple[int, int] | None:
    found: list[tuple[int, int]] = []
    for path in folder.glob("rank-*.made"):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if len(content) >= at + _LAYOUT.size and any(content[at : at + _LAYOUT.size]):
            generation, step = _LAYOUT.unpack_from(content, at)
            found.append((generation, step))
    return max(found, default=None)
