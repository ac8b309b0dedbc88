"""Makes the snapshots that a rank has copied valid, in a thread of its own, while the training continues."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import replace

from perdure_training.background import lower_thread_priority
from perdure_training.checkpoint.durable import DurableCheckpoints
from perdure_training.checkpoint.peers import Peers
from perdure_training.checkpoint.save_failures import SaveFailures
from perdure_training.checkpoint.slots import Slots
from perdure_training.checkpoint.verification import fingerprint, verified_crc32
from perdure_training.checkpoint.world import Completeness
from perdure_training.snapshots.arena import Arena, Header, Slot

logger = logging.getLogger(__name__)


class SnapshotFinisher:
    """Gives each staged snapshot its checksum, has it copied to other nodes, and counts it."""

    durable: DurableCheckpoints | None = None
    """Stores the snapshots that are to be durable."""

    def __init__(self, slots: Slots, complete: Completeness, peers: Peers, failures: SaveFailures) -> None:
        """Creates the object, and its thread.

        Args:
            slots: The slots of the rank, which learn what is finished.
            complete: Counts the ranks that have a step.
            peers: The nodes that keep copies.
            failures: Warns of what fails.
        """
        self._slots = slots
        self._complete = complete
        self._peers = peers
        self._failures = failures
        self.seconds = 0.0
        """Time of a core that the thread has used."""
        self._staged: queue.Queue[tuple[Slot, memoryview | None, Header, bool] | None] = queue.Queue()
        threading.Thread(target=self._run, name="perdure-snapshots", daemon=True).start()

    def finish(self, slot: Slot, header: Header, *, room: memoryview | None = None, durable: bool = False) -> None:
        """Has a snapshot finished.

        Args:
            slot: Its slot, staged.
            header: Its header; without the checksum where `room` is given.
            room: Its bytes, which are new; None for a snapshot that was loaded.
            durable: Whether the script requests that it is stored.
        """
        self._staged.put((slot, room, header, durable))

    def renew(self, arena: Arena) -> bool:
        """Makes the folder of the snapshots where it could not be made before, and again where something else has
        deleted it, as systemd does with `RemoveIPC` at a logout; returns whether it was missing.

        Raises:
            OSError: if it cannot be created.
        """
        if arena.is_there:
            return False
        self.flush()
        was_deleted = arena.was_made
        arena.make()
        if was_deleted:
            logger.warning("perdure: %s was deleted with all snapshots: the next steps are saved again", arena.folder)
        self._slots.reload()
        return True

    def flush(self) -> None:
        """Waits until all staged snapshots are valid."""
        self._staged.join()

    def close(self) -> None:
        """Ends the thread, once all that was staged is finished."""
        self.flush()
        self._staged.put(None)

    def _run(self) -> None:
        lower_thread_priority()
        while (staged := self._staged.get()) is not None:
            try:
                self._finish(*staged)
            except Exception:
                # Whatever it is, the training waits for this thread when it ends, and before it stores a step.
                logger.exception("perdure: a step is not complete, and the next one is another try")
            finally:
                # A reference to the room would keep its memory from being given up.
                del staged
                self._staged.task_done()

    def _finish(self, slot: Slot, room: memoryview | None, header: Header, durable: bool) -> None:
        durably: DurableCheckpoints | None = None
        try:
            begun = time.thread_time()
            if room is not None:
                header = replace(header, checksum=fingerprint(room))
                slot.finish(header)
                if self.durable is not None and (durable or self.durable.is_announced(header.step)):
                    durably = self.durable
            content = slot.read() if room is None else room
            crc = verified_crc32(content, header) if durably is not None or self._peers.wanted else 0
            copied = self._peers.copy(slot, header, number=self._slots.number(slot), crc32=crc)
            if self._peers.refused:
                self._complete.refuse_copies()
            self._complete.add(header.step, copied=copied)
            # Until `finish` below, no other step is written there.
            if durably is not None:
                durably.store(header, content, slot.pin(), crc32=crc)
            self.seconds += time.thread_time() - begun
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError):
                self._failures.warn(header.step, error)
            # Else the store has ended with its generation, and so will this process.
            logger.debug("step %d is not complete: %s", header.step, error)
            if durably is not None:
                durably.refuse(header.step, str(error))
        finally:
            self._slots.finish(slot)
