"""Lists the checkpoints in the storage for ranks, within bounded time: a call to a network file system whose server is
gone never returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from perdure.agent.checkpoint.connections import Json
from perdure.agent.checkpoint.further_tries import FurtherTries
from perdure.agent.checkpoint.storage import Storage
from perdure.contract.checkpoints import CheckpointRef

_WITHIN = 20.0
"""Seconds in which ranks get an answer: less than they wait for one."""


class Listing:
    """The checkpoints of one node's storage.

    Invariant: a storage that hangs takes one thread for each place, and one more now and then, however often it is
    asked.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        is_sound: Callable[[CheckpointRef], bool],
        is_trusted: Callable[[CheckpointRef], bool],
    ) -> None:
        """Creates the object.

        Args:
            storage: The storage.
            is_sound: Whether the state of a checkpoint is sound, as far as the job knows.
            is_trusted: Whether it is, and the job has not failed after that was loaded.
        """
        self._storage = storage
        self._is_sound = is_sound
        self._is_trusted = is_trusted
        self._lock = threading.Lock()
        self._running: dict[str, Future[Json]] = {}
        """By place, what has not been answered yet."""
        self._tries: dict[str, FurtherTries] = {}
        """By place, where the storage hangs."""

    def get(self, place: str) -> Json:
        """Returns the checkpoints of a place; the same to all who ask before the storage has answered.

        Raises:
            OSError: if the storage does not answer.
        """
        with self._lock:
            answer, tries = self._running.get(place), self._tries.get(place)
            if answer is None or (tries is not None and tries.is_due()):
                answer = self._running[place] = Future()
                threading.Thread(target=self._list, args=(place, answer), name="listing", daemon=True).start()
        try:
            return answer.result(_WITHIN)
        except TimeoutError:
            if answer.done():
                # The storage's own error.
                raise
            with self._lock:
                if place not in self._tries:
                    self._tries[place] = FurtherTries()
                    self._tries[place].is_due()
            raise OSError(
                f"{self._storage.url} hangs: it has not listed its checkpoints within {_WITHIN:g} s"
            ) from None

    def _list(self, place: str, answer: Future[Json]) -> None:
        try:
            found = self._find(place)
        except BaseException as error:
            self._forget(place, answer)
            answer.set_exception(error)
        else:
            self._forget(place, answer)
            answer.set_result(found)

    def _forget(self, place: str, answer: Future[Json]) -> None:
        with self._lock:
            if self._running.get(place) is answer:
                del self._running[place]
                self._tries.pop(place, None)

    def _find(self, place: str) -> Json:
        """The checkpoints in the order in which they are tried: those that are trusted, the latest first.

        The oldest sound one is trusted in any case: to begin anew would cost the whole training. Distrusted ones
        follow, the oldest first, for a job whose trusted ones are all damaged. One that has lost its metadata is
        listed, too: it is damaged, and was not left unfinished.
        """
        storage = self._storage
        found = [one for one in storage.saved(place) if storage.is_committed(one) or storage.has_lost_metadata(one)]
        trusted = [one for one in found if self._is_trusted(one)]
        trusted = trusted or [one for one in found if self._is_sound(one)][-1:] or found[-1:]
        others = [one for one in found if one not in trusted]
        return {
            "checkpoints": [{"folder": one.folder, "step": one.step} for one in (*trusted, *reversed(others))],
            "distrusted": [one.step for one in others],
            "url": storage.url,
        }
