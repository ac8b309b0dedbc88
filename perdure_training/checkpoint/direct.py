"""Has steps stored without snapshots, where the memory folder is too small for these.

A step that is to be stored lies in a file without a name: in the memory folder if one step fits there, else on disk.
The agent gets the open file as it gets that of a snapshot; once it has copied it, the room is free again. No restore
finds such a file, so the training continues from storage, or from the newest snapshots: they stay until a newer step is
stored.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.distributed import Store

from perdure_training.checkpoint.durable import DurableCheckpoints
from perdure_training.checkpoint.slots import Slots
from perdure_training.checkpoint.staging import Layout
from perdure_training.checkpoint.world import RankIdentity, snapshot_header
from perdure_training.snapshots.arena import PAGE, Arena, SnapshotPin

logger = logging.getLogger(__name__)

MORE_MEMORY = "Raise resources.shm, or save less. The training continues"
_NO_ROOM = "no-room"
"""Key in the ranks' store, set once a rank has no room for snapshots."""
_PATIENCE = 60.0
"""Seconds for which a step that the script has stored waits for the one before: they need the same room."""


class DirectSaves:
    """The steps of a rank that makes no snapshots any more.

    Invariants:
        - The newest snapshots are given up once a newer step is stored, and before only for the room of such a step.
        - One step at a time takes room.
        - A step for which there is no room is a warning, and is not stored.
    """

    def __init__(
        self,
        own: RankIdentity,
        arena: Arena,
        slots: Slots,
        store: Store,
        durably: DurableCheckpoints | None,
        *,
        replicated: bool,
    ) -> None:
        """Creates the object.

        Args:
            own: This rank.
            arena: The snapshots of the node.
            slots: Those of this rank.
            store: The generation's store.
            durably: Stores steps; None if no agent can.
            replicated: Whether the state is the same on every rank.
        """
        self._own = own
        self._replicated = replicated
        self._arena = arena
        self._slots = slots
        self._kept: int | None = None
        """The newest step of which this rank keeps a snapshot; None for none."""
        self._store = store
        self._durably = durably if durably is not None and durably.stores else None
        self._problem = ""

    @property
    def stores(self) -> bool:
        """Whether the job has a storage."""
        return self._durably is not None

    @property
    def is_needed(self) -> bool:
        """Whether another rank keeps no snapshots, so that no step will be complete, and steps are stored directly."""
        return self._durably is not None and self._store.check([_NO_ROOM])

    def begin(self) -> None:
        """Gives up the snapshots but the newest ones. Nothing is staged."""
        self._kept = self._slots.keep_newest()

    def _give_up_snapshots(self) -> None:
        """Deletes what is left, also the copies of other nodes' snapshots: they would be loaded in place of newer steps
        in storage."""
        self._kept = None
        self._slots.clear()
        for slot, header in self._arena.snapshots() if self._own.local_rank == 0 else ():
            if header.rank not in self._own.ranks_of_node:
                slot.clear()

    def announce_need(self, problem: str) -> None:
        """Warns that this rank keeps no snapshots, and has the others keep none."""
        stored = ", and checkpoints are stored without snapshots" if self._durably is not None else ""
        logger.warning("perdure: no further checkpoints in memory: %s. %s%s", problem, MORE_MEMORY, stored)
        if self._durably is not None:
            self._store.set(_NO_ROOM, str(self._own.rank))

    def save(self, step: int, plan: Callable[[], Layout], *, durable: bool, reported: int | None = None) -> bool:
        """Copies a state if it is to be stored, and has another thread store it.

        Args:
            step: The step.
            plan: Returns the state's layout.
            durable: Whether the script requests that it is stored; it waits for the step before then.
            reported: As in `Header`.

        Returns:
            Whether it will be stored.
        """
        durably = self._durably
        if durably is None:
            return False
        if self._kept is not None and durably.newest_stored() > self._kept:
            self._give_up_snapshots()
        if not (durable or durably.is_announced(step)):
            return False
        if not durably.wait_until_taken(_PATIENCE if durable else 0.0):
            durably.refuse(step, "the room for a step is taken: the storage has not taken the one before")
            return False
        layout = plan()
        try:
            descriptor = self._room(PAGE + layout.size)
        except OSError as error:
            problem = f"{layout.size:,} bytes fit neither into {self._arena.folder} nor on disk: {error}"
            log = logger.debug if problem == self._problem else logger.warning
            log("perdure: step %d is not stored: %s. Set TMPDIR to a folder with room", step, problem)
            self._problem = problem
            durably.refuse(step, problem)
            return False
        pin = _Room(descriptor)
        try:
            content = memoryview(mmap.mmap(descriptor, PAGE + layout.size))[PAGE:]
            layout.copy_into(content)
        except BaseException:
            pin.release()
            raise
        header = snapshot_header(self._own, step, layout, replicated=self._replicated, reported=reported)
        durably.store(header, content, pin, crc32=None)
        return True

    def _room(self, size: int) -> int:
        """Returns an open file of so many bytes.

        Raises:
            OSError: if neither folder has room; the error is the disk's.
        """
        try:
            return _unnamed_file(self._arena.folder, size)
        except OSError:
            try:
                return _unnamed_file(Path(tempfile.gettempdir()), size)
            except OSError:
                if self._kept is None:
                    raise
        self._give_up_snapshots()
        return _unnamed_file(self._arena.folder, size)


class _Room(SnapshotPin):
    """An open file that takes no room once it is released, even if something still maps it, such as tensors that wait
    for Python's garbage collection."""

    def release(self) -> None:
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)
        super().release()


def _unnamed_file(folder: Path, size: int) -> int:
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        # Without it, a full disk would end the process with SIGBUS at the first write.
        os.posix_fallocate(file.fileno(), 0, size)
        return os.dup(file.fileno())
