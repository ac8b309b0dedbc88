"""The newest step that each rank has made, saved or not: what is done again after a restore can be counted by it."""

from __future__ import annotations

import logging
import mmap
import os
import struct
from pathlib import Path

logger = logging.getLogger(__name__)

_LAYOUT = struct.Struct("<QQ")
"""Generation and step."""


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
            self._map = mmap.mmap(-1, _LAYOUT.size)

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


def _map(folder: Path, rank: int) -> mmap.mmap:
    descriptor = os.open(folder / f"rank-{rank}.made", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # A hole in a full tmpfs would end the process with SIGBUS.
        if os.fstat(descriptor).st_size < _LAYOUT.size:
            os.pwrite(descriptor, bytes(_LAYOUT.size), 0)
        return mmap.mmap(descriptor, _LAYOUT.size)
    finally:
        os.close(descriptor)


def newest_made(folder: Path) -> tuple[int, int] | None:
    """Returns the newest generation of which a rank has made steps on this node, and the newest one of these steps."""
    found: list[tuple[int, int]] = []
    for path in folder.glob("rank-*.made"):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if len(content) >= _LAYOUT.size and any(content):
            generation, step = _LAYOUT.unpack_from(content)
            found.append((generation, step))
    return max(found, default=None)
