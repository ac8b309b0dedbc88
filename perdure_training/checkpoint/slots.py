"""Which slot a rank writes next: never the one with the newest step that all ranks have, nor one whose snapshot another
thread still makes valid, nor one that is pinned because its snapshot is being copied to storage, nor one that the state
which was restored from it still reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from perdure_training.snapshots.arena import Arena, Header, Slot

_COUNT = 3
"""The newest step that all ranks have, the one that others may not have yet, and the one that is written. With two, a
rank that is ahead would overwrite the only step that it has in common with the others."""

_LEASED = 1
"""Slots beside these for snapshots that are being copied to storage: they are used only while others are pinned, so
that a slow storage costs memory and no snapshots."""

_PATIENCE = 10.0
"""Seconds after which a step that others have not saved is given up: they may save other steps than this rank."""


class Slots:
    """The slots of one rank."""

    count = _COUNT

    def __init__(
        self,
        arena: Arena,
        rank: int,
        *,
        world_size: int | None = None,
        is_complete: Callable[[int], bool],
        give_up: Callable[[int], bool] = lambda _: True,
        is_spoiled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the object; `reload` finds out what the slots contain.

        Args:
            arena: The snapshots of the node.
            rank: The rank.
            world_size: The size of its world; None if the state is replicated.
            is_complete: Returns whether all ranks have a step.
            give_up: Tells the others that this rank will not have a step; returns False if all ranks have it by now.
            is_spoiled: Returns whether the job goes back, as far as that is known: nothing is overwritten then.
            clock: Returns seconds.
        """
        self._slots = [arena.slot(rank, number, world_size=world_size) for number in range(_COUNT + _LEASED)]
        self._rank = rank
        self._is_complete = is_complete
        self._give_up = give_up
        self._is_spoiled = is_spoiled
        self._clock = clock
        self._steps: dict[int, int] = {}
        """The steps of the slots, by number."""
        self._staged: set[int] = set()
        """The slots that are filled, and not valid yet."""
        self._held: Path | None = None
        """The file whose bytes are part of the restored state, as long as they are."""
        self._complete: int | None = None
        self._full_since: float | None = None

    def reload(self) -> None:
        """Reads what is in memory."""
        self._steps = {}
        for number, slot in enumerate(self._slots):
            if (header := slot.header()) is not None:
                self._steps[number] = header.step

    def begin_anew(self) -> None:
        """Records that nothing was loaded: every slot may be written. What is in them stays until then."""
        self._steps = {}

    def adopt(self, step: int, *, loaded: Slot) -> None:
        """Records that all ranks have loaded a step, this one from the snapshot `loaded`."""
        self.reload()
        self._complete = step
        for slot in self._slots:
            slot.take_mapping(loaded)

    def reserve(self, size: int) -> None:
        """Takes the room of all snapshots at once, before others do.

        Raises:
            NoRoom: if the memory folder is too small.
        """
        for slot in self._slots[:_COUNT]:
            slot.reserve(size)

    @property
    def newest_complete(self) -> int | None:
        """The newest step that all ranks are known to have; None where none is known."""
        return self._complete

    def complete(self) -> list[tuple[Slot, Header]]:
        """The snapshots of the step that all ranks have, as far as this rank knows."""
        found = [(slot, slot.header()) for number, slot in enumerate(self._slots) if number in self._steps]
        return [(slot, header) for slot, header in found if header is not None and header.step == self._complete]

    def has(self, slot: Slot) -> bool:
        """Whether a slot is one of these."""
        return any(one.path == slot.path for one in self._slots)

    def number(self, slot: Slot) -> int:
        """The number of a slot, the same on all nodes that have a copy of it."""
        return self._slots.index(slot)

    def free_slot(self) -> Slot:
        """Returns a slot for a snapshot that another rank sends: the one with the oldest step."""
        return self._slots[min(self._unpinned(), key=lambda number: self._steps.get(number, -1))]

    def take_over(self, slot: Slot, *, world_size: int) -> Slot:
        """Makes another rank's snapshot, whose state is the same, this rank's; returns its slot."""
        own = self.free_slot()
        # It may have been made for what another rank was to send, and its mapping is not of the file that follows.
        own.clear()
        slot.move(own.path, rank=self._rank, world_size=world_size)
        return own

    @property
    def pinned(self) -> bool:
        """Whether a snapshot is being copied to storage."""
        return any(slot.is_pinned for slot in self._slots)

    def _unpinned(self) -> list[int]:
        """The slots that may be written, as many as there are where nothing is copied to storage, and those in use."""
        free = [number for number, slot in enumerate(self._slots) if not slot.is_pinned]
        return free[:_COUNT] + [number for number in free[_COUNT:] if number in self._steps]

    def choose(self, *, awaits_others: bool = True) -> Slot | None:
        """Returns the slot for the next step; None if writing any of them could cost the step that all ranks have, or
        the newest one that is sound. With `awaits_others`, a step that others do not have is waited for."""
        unpinned = self._unpinned()
        for number in unpinned:
            if number not in self._steps:
                return self._slots[number]
        for step in sorted(self._steps.values(), reverse=True):
            if step == self._complete or self._is_complete(step):
                self._complete = step
                break
        if self._is_spoiled():
            return None
        free = [number for number in unpinned if number in self._steps and not self._is_in_use(number)]
        newest = -1 if self._complete is None else self._complete
        older = sorted((number for number in unpinned if self._steps[number] < newest), key=self._steps.__getitem__)
        if self._held is not None:
            # A slot less is free. The newest of these may be the newest one that is sound, which shows later.
            older = older[:-1]
        if (oldest := next((number for number in older if number in free), None)) is not None:
            self._full_since = None
            return self._slots[oldest]
        now = self._clock()
        self._full_since = now if self._full_since is None else self._full_since
        pending = [number for number in free if self._steps[number] > newest]
        if not pending or (awaits_others and now - self._full_since < _PATIENCE):
            return None
        self._full_since = None
        oldest = min(pending, key=lambda number: self._steps[number])
        # Else others would overwrite the step before it once they have it, too.
        return self._slots[oldest] if self._give_up(self._steps[oldest]) else self.choose(awaits_others=awaits_others)

    def _is_in_use(self, number: int) -> bool:
        return number in self._staged or self._slots[number].path == self._held

    def stage(self, slot: Slot, step: int) -> None:
        """Records that a slot is filled with a step; `finish` follows."""
        number = self._slots.index(slot)
        self._steps[number] = step
        self._staged.add(number)

    def finish(self, slot: Slot) -> None:
        """Records that a slot's snapshot is valid, or will never be. Any thread may call it."""
        self._staged.discard(self._slots.index(slot))

    def hold(self, slot: Slot) -> None:
        """Keeps a snapshot from being overwritten until `release`."""
        self._held = slot.path

    def release(self) -> None:
        """Records that the snapshot may be overwritten. Any thread may call it."""
        self._held = None

    def keep_newest(self) -> int | None:
        """Gives up all that is older than the newest step that all ranks have; returns the newest step that is kept,
        None where none is. Nothing is staged."""
        steps = {number: step for number, step in self._steps.items() if self._slots[number].header() is not None}
        newest_first = sorted(steps.values(), reverse=True)
        complete = next((step for step in newest_first if step == self._complete or self._is_complete(step)), -1)
        self._steps = {number: step for number, step in steps.items() if step >= complete}
        for number, slot in enumerate(self._slots):
            if number not in self._steps:
                slot.clear()
        return max(self._steps.values(), default=None)

    def clear(self) -> None:
        """Gives up all slots, and their memory."""
        for slot in self._slots:
            slot.clear()
        self._steps = {}
