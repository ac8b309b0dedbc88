"""The steps that rank 0 announces, so that all ranks store the same ones.

A script saves the steps that it chooses: each of them, each tenth, or the last one of an epoch. So rank 0 announces a
step, and the first one at or after it that the script saves is stored. All ranks save the same steps, and count the
announcements alike.
"""

from __future__ import annotations

import threading
from collections import deque

from torch.distributed import Store

_REMEMBERED = 64
"""Saved steps that are remembered: more than may be in the hands of other threads at a time."""


class Announcements:
    """The announcements of a generation, as one rank knows them.

    Invariants:
        - A step that is to be stored is named to every thread that asks, however often.
        - A rank that learns of an announcement late stores its next step: the others' threads learn that they store
        different ones, and all ranks still count alike.
    """

    def __init__(self, store: Store) -> None:
        """Creates the object.

        Args:
            store: A connection that only this object uses.
        """
        self._store = store
        self._lock = threading.Lock()
        self._made = 0
        """The number of announcements that this rank has made."""
        self._saved: tuple[int, ...] = ()
        """The steps that are due, in their order. The training's own thread adds them, and others read them."""
        self._passed = -1
        """The newest step that is not stored."""
        self._number = 0
        """The next announcement."""
        self._announced: int | None = None
        """Its step; None as long as it is not known."""
        self._stored: deque[int] = deque(maxlen=_REMEMBERED)

    def make(self, step: int) -> None:
        """Announces a step, as rank 0."""
        self._store.set(_key(self._made), str(step))
        self._made += 1

    def record(self, step: int) -> None:
        """Records that a step is saved next."""
        if not self._saved or step > self._saved[-1]:
            self._saved = (*self._saved, step)[-_REMEMBERED:]

    def expect(self, step: int) -> None:
        """Records that a step is stored without an announcement."""
        self._stored.append(step)

    def has_passed(self, step: int) -> bool:
        """Whether this rank does not store a step, and cannot any more."""
        return step <= self._passed and step not in self._stored

    def has(self, step: int) -> bool:
        """Whether a step that was recorded is to be stored."""
        with self._lock:
            while step not in self._stored:
                if (first := self._first()) is None or step < first:
                    self._passed = max(self._passed, step)
                    return False
                self._stored.append(first)
                self._number, self._announced = self._number + 1, None
            return True

    def _first(self) -> int | None:
        """The step that the next announcement is about; None as long as it is not known."""
        if self._announced is None:
            if not self._store.check([_key(self._number)]):
                return None
            # A step that has passed unstored cannot be stored any more.
            self._announced = max(int(self._store.get(_key(self._number))), self._passed + 1)
        return next((one for one in self._saved if one >= self._announced), None)


def _key(number: int) -> str:
    return f"durable/announced/{number}"
