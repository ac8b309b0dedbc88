"""Has all ranks save one step and wait at it, before a change that is planned ends them.

The control plane requests it through the nodes' agents, and each rank looks for that in a small file at each step. All
ranks wait at the same step: rank 0 chooses it once every rank has seen the request. They wait until the step is whole,
with its copies on other nodes where one leaves, and then until they are ended. Where the step would be lost, where the
request is withdrawn, and after a minute in any case, they train on.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

from torch.distributed import Store

from perdure_training.checkpoint.distributed_format import names_that_differ
from perdure_training.checkpoint.resharding import FormerSnapshot
from perdure_training.checkpoint.world import Completeness, RankIdentity
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.storage_link import StorageAway, StorageLink, StorageProblem
from perdure_training.snapshots.arena import Arena

logger = logging.getLogger(__name__)

_LEAD = 2
"""Steps between the choice of a step and that step: every rank has made one step together with rank 0 by then."""
_SAFE_WITHIN = 60.0
"""Seconds within which all ranks must have saved the step, and its copies must have arrived."""
_ENDED_WITHIN = 60.0
"""Seconds for which the ranks then wait to be ended."""
_MARGIN = 15.0
"""Seconds that the others wait longer than rank 0, which tells them when to train on."""
_REPORTED_WITHIN = 20.0
_LOOK = 0.02


@dataclass(frozen=True)
class Hold:
    """A request to wait."""

    number: int
    resizes: bool
    """A world of another size follows."""
    copies: bool
    """Copies on other nodes are waited for."""


_checkpointers: Counter[tuple[object, ...]] = Counter()
"""The checkpointers of each rank of this process. Where a rank has several, none of them waits: the others could not
save that step any more."""


class PlannedHold:
    """One rank's part in the waits of a world for changes that are planned.

    Invariants:
        - All ranks wait at the same step, or train on within bounded time.
        - A world whose change is not requested pays one system call a step.
    """

    def __init__(self, own: RankIdentity, store: Store, complete: Completeness, link: StorageLink | None) -> None:
        """Creates the object.

        Args:
            own: This rank.
            store: A connection to the generation's store that only this object uses.
            complete: Counts the ranks that have a step.
            link: The node's agent; None where there is none.
        """
        self._own = own
        self._store = store
        self._complete = complete
        self._link = link
        self._seen = self._chosen = self._done = 0
        self._place = (own.folder.parent, own.folder.name, own.generation, own.rank)
        _checkpointers[self._place] += 1

    def close(self) -> None:
        """Ends the part of a checkpointer that saves nothing more."""
        _checkpointers[self._place] -= 1

    def due(self, step: int) -> Hold | None:
        """Returns the request for which this rank waits once it has saved `step`; None where it does not. Every rank
        calls it at each step."""
        if self._link is None or (hold := self._requested()) is None or hold.number <= self._done:
            return None
        if _checkpointers[self._place] > 1:
            return None
        try:
            return hold if self._is_step(hold.number, step) else None
        except RuntimeError:
            # The store has ended with its generation, and so will this process.
            return None

    def wait(
        self,
        hold: Hold,
        step: int,
        *,
        saved: bool,
        arena: Arena,
        each_rank: Collection[str],
        common: Collection[str],
    ) -> None:
        """Waits at a step until this process is ended; returns where it trains on.

        Args:
            hold: The request.
            step: The step.
            saved: Whether this rank has saved it.
            arena: The snapshots of the node.
            each_rank: Names of the state that a rank of another world begins anew.
            common: Names of values of which a world of another size takes rank 0's.
        """
        self._done = hold.number
        until = (
            time.monotonic() + _SAFE_WITHIN + _ENDED_WITHIN + _REPORTED_WITHIN + (_MARGIN if self._own.rank else 0.0)
        )
        with contextlib.suppress(RuntimeError):
            if not saved:
                self._tell(hold, "failed", f"rank {self._own.rank} has no room to save step {step:,}")
            elif hold.resizes:
                self._tell(hold, f"values/{self._own.rank}", self._values(arena, step, each_rank))
            if self._own.rank == 0:
                self._lead(hold, step, common, until)
            while time.monotonic() < until and not self._store.check([self._key(hold, "over")]):
                time.sleep(_LOOK)
            return
        # The store has ended with its generation, and so will this process: a step that it made now would be lost.
        while time.monotonic() < until:
            time.sleep(_LOOK)

    def _requested(self) -> Hold | None:
        assert self._link is not None
        desired = self._link.desired()
        number = int(desired.get("hold", 0))
        if not number or int(desired.get("hold_generation", 0)) != self._own.generation:
            return None
        return Hold(number, resizes=bool(desired.get("hold_resizes")), copies=bool(desired.get("hold_copies")))

    def _is_step(self, number: int, step: int) -> bool:
        ready, chosen = f"hold/{number}/ready", f"hold/{number}/step"
        if number != self._seen:
            self._seen = number
            # From now on this rank looks for the step at each step that it saves.
            self._store.add(ready, 1)
        if self._own.rank == 0 and number != self._chosen and self._store.add(ready, 0) >= self._own.world_size:
            self._chosen = number
            self._store.set(chosen, str(step + _LEAD))
        return self._store.check([chosen]) and step >= int(self._store.get(chosen))

    def _lead(self, hold: Hold, step: int, common: Collection[str], until: float) -> None:
        """Reports, as rank 0, when the step is safe, and has all ranks train on where they are not ended then."""
        problem = self._until_safe(hold, step) or (self._differing(hold, common) if hold.resizes else "")
        report: Json = {
            "request": "held",
            "generation": self._own.generation,
            "number": hold.number,
            "step": step,
            "problem": problem,
        }
        assert self._link is not None
        try:
            self._link.insist(report, patience=_REPORTED_WITHIN)
        except (StorageAway, StorageProblem) as error:
            problem = str(error)
        if problem:
            logger.warning("perdure: the ranks do not wait at step %d for a change that is planned: %s", step, problem)
        else:
            logger.warning("perdure: the ranks wait at step %d, as a change that is planned ends them", step)
            ended = min(time.monotonic() + _ENDED_WITHIN, until)
            while time.monotonic() < ended and self._requested() == hold:
                time.sleep(_LOOK)
        self._store.set(self._key(hold, "over"), "")

    def _until_safe(self, hold: Hold, step: int) -> str:
        """Waits until the step is whole; returns why it is not."""
        until = time.monotonic() + _SAFE_WITHIN
        safe: Callable[[int], bool] = self._complete.is_copied if hold.copies else self._complete.is_complete
        while not safe(step):
            if self._store.check([self._key(hold, "failed")]):
                return str(self._told(hold, "failed"))
            if hold.copies and self._complete.are_copies_refused():
                return "a node has no room for the copies of another node's snapshots"
            if time.monotonic() >= until:
                what = "its copies were not on other nodes" if hold.copies else "not all ranks had saved it"
                return f"{what} within {_SAFE_WITHIN:.0f} s"
            time.sleep(_LOOK)
        return ""

    def _differing(self, hold: Hold, common: Collection[str]) -> str:
        """Why a world of another size could not load the step; empty if it can."""
        until = time.monotonic() + _SAFE_WITHIN
        values: list[Any] = []
        for rank in range(self._own.world_size):
            key = self._key(hold, f"values/{rank}")
            while not self._store.check([key]):
                if time.monotonic() >= until:
                    return f"rank {rank} did not say within {_SAFE_WITHIN:.0f} s which values it has"
                time.sleep(_LOOK)
            values.append(self._told(hold, f"values/{rank}"))
        if problem := next((one for one in values if isinstance(one, str)), ""):
            return problem
        names = sorted(names_that_differ(values) - set(common))
        if not names:
            return ""
        first = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        verb = "differ" if len(names) > 1 else "differs"
        return f"{first} {verb} between ranks, and a world of another size cannot split that"

    def _values(self, arena: Arena, step: int, each_rank: Collection[str]) -> Any:
        """What tells whether the ranks have the same values: of those that are not split. Why that is not known."""
        own, until = self._own, time.monotonic() + _SAFE_WITHIN
        while time.monotonic() < until:
            for slot, header in arena.snapshots():
                if (header.step, header.rank, header.generation) == (step, own.rank, own.generation):
                    try:
                        return FormerSnapshot(slot, own.rank, each_rank=frozenset(each_rank)).whole_values()
                    except (ValueError, KeyError, OSError) as error:
                        return f"rank {own.rank}: {error}"
            # Another thread makes it valid.
            time.sleep(_LOOK)
        return f"the snapshot of rank {own.rank} was not valid within {_SAFE_WITHIN:.0f} s"

    def _key(self, hold: Hold, name: str) -> str:
        return f"hold/{hold.number}/{name}"

    def _tell(self, hold: Hold, name: str, value: object) -> None:
        # The type stub of `Store.set` does not list bytes.
        self._store.set(self._key(hold, name), cast("Any", pickle.dumps(value)))

    def _told(self, hold: Hold, name: str) -> Any:
        return pickle.loads(self._store.get(self._key(hold, name)))
