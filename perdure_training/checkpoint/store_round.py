"""What the ranks tell each other to store one checkpoint together: through the generation's store, from a thread.

A rank that fails tells its reason in place of what the others wait for, so that none of them waits in vain, and all
know the same.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from torch.distributed import Store

from perdure_training.node_api.storage_link import StorageProblem

OFFER: Final = "offer"
PLAN: Final = "plan"
RESULTS: Final = "results"
GATHERED: Final = (OFFER, PLAN, RESULTS)
"""What each rank tells rank 0."""
CHOICE: Final = "choice"
"""What rank 0 tells all ranks."""
FINAL: Final = "final"
"""What rank 0 tells each rank."""

_SHORTEST, _LONGEST = 0.02, 0.5
"""Seconds between two looks into the store. To wait in it would keep a process from ending in an orderly way, and each
timeout prints a warning."""


class RankFailed(StorageProblem):
    """Another rank stores nothing of this checkpoint; the message says which and why."""


class Superseded(StorageProblem):
    """A rank is to store a newer step by now, and has given this one up: no failure."""


@dataclass(frozen=True)
class _Failure:
    """What a rank tells in place of its value."""

    problem: str
    is_superseded: bool


class StoreRound:
    """One checkpoint, as one rank sees it."""

    def __init__(self, store: Store, number: int, *, rank: int, world_size: int) -> None:
        """Creates the object.

        Args:
            store: A connection that no other thread uses.
            number: The number of the checkpoint in this generation: all ranks count alike.
            rank: This rank.
            world_size: The number of ranks.
        """
        self._store = store
        self._prefix = f"durable/{number}"
        self._rank = rank
        self._ranks = range(world_size)
        self._told: set[str] = set()

    def gather(self, kind: str, value: object, *, within: float) -> list[Any] | None:
        """Tells rank 0 a value; returns all ranks' values there, None elsewhere.

        Raises:
            RankFailed: if a rank has failed.
            StorageProblem: if one has told nothing within so many seconds.
        """
        self._tell(f"{kind}/{self._rank}", value)
        if self._rank:
            return None
        keys = [f"{kind}/{rank}" for rank in self._ranks]
        missing = self._wait(keys, within)
        if missing:
            ranks = ", ".join(str(rank) for rank, key in enumerate(keys) if key in missing)
            raise StorageProblem(f"rank {ranks} has not told its part within {within:.0f} s")
        return [self._read(key) for key in keys]

    def tell_each(self, kind: str, values: Sequence[object]) -> None:
        """Tells each rank a value of its own, as rank 0."""
        for rank, value in zip(self._ranks, values, strict=True):
            self._tell(f"{kind}/{rank}", value)

    def tell_all(self, kind: str, value: object) -> None:
        """Tells all ranks the same value, as rank 0."""
        self._tell(kind, value)

    def learn(self, kind: str, *, own: bool = False, within: float | None) -> Any:
        """Returns what rank 0 has told all ranks, or with `own` this rank. None for `within` waits until the generation
        ends.

        Raises:
            RankFailed: if a rank has failed, and rank 0 therefore.
            StorageProblem: if rank 0 has told nothing within so many seconds.
        """
        key = f"{kind}/{self._rank}" if own else kind
        if self._wait([key], within):
            raise StorageProblem(f"rank 0 has not answered within {within:.0f} s")
        return self._read(key)

    def fail(self, problem: StorageProblem) -> None:
        """Tells the others why this rank stores nothing, in place of everything that they may still wait for."""
        keys = ["failed", *(f"{kind}/{self._rank}" for kind in GATHERED)]
        if self._rank == 0:
            keys += [CHOICE, *(f"{FINAL}/{rank}" for rank in self._ranks)]
        for key in keys:
            if key not in self._told:
                self._tell(key, _Failure(str(problem), isinstance(problem, Superseded)))

    def check(self) -> None:
        """Raises RankFailed if a rank has failed."""
        if self._store.check([f"{self._prefix}/failed"]):
            self._read("failed")

    def forget(self) -> None:
        """Deletes, as rank 0, the large values, when all ranks have read them."""
        for kind in (PLAN, FINAL, RESULTS):
            for rank in self._ranks:
                self._store.delete_key(f"{self._prefix}/{kind}/{rank}")

    def _tell(self, key: str, value: object) -> None:
        self._told.add(key)
        # The type stub of `Store.set` does not list bytes.
        self._store.set(f"{self._prefix}/{key}", cast("Any", pickle.dumps(value)))

    def _read(self, key: str) -> Any:
        value = pickle.loads(self._store.get(f"{self._prefix}/{key}"))
        if isinstance(value, _Failure):
            raise (Superseded if value.is_superseded else RankFailed)(value.problem)
        return value

    def _wait(self, keys: Sequence[str], within: float | None) -> set[str]:
        """Waits until all keys are there; returns those that are not within so many seconds."""
        until = None if within is None else time.monotonic() + within
        missing, pause = list(keys), _SHORTEST
        while not self._store.check([f"{self._prefix}/{key}" for key in missing]):
            if until is not None and time.monotonic() >= until:
                return {key for key in missing if not self._store.check([f"{self._prefix}/{key}"])}
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return set()
