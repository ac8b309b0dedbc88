"""Has all ranks save one step and wait at it, before a change that is planned ends them.

The control plane requests it through the nodes' agents, and each rank looks for that in a small file at each step. All
ranks wait at the same step: rank 0 chooses it once every rank has seen the request. They wait until the step is whole,
with its copies on other nodes where one leaves, and then until they are ended. Where the step would be lost, where the
request is withdrawn, and after a minute in any case, they train on. Before a suspension, which ends all nodes, the step
is stored as well, and they wait for so much longer.

The checkpointers of a script that has several wait together: each saves the state that it has at that step, and the
rank waits after the last of these saves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from torch.distributed import Store

from perdure_training.checkpoint.distributed_format import names_that_differ
from perdure_training.checkpoint.resharding import FormerSnapshot
from perdure_training.checkpoint.save_turns import SaveTurns, turns_of
from perdure_training.checkpoint.world import Completeness, RankIdentity
from perdure_training.node_api.agent_client import Json
from perdure_training.node_api.hold_times import ENDED_WITHIN, LONGEST, MARGIN, REPORTED_WITHIN, SAFE_WITHIN
from perdure_training.node_api.storage_link import StorageAway, StorageLink, StorageProblem
from perdure_training.snapshots.arena import Arena

logger = logging.getLogger(__name__)

_LEAD = 2
"""Steps between the choice of a step and that step: every rank has made one step together with rank 0 by then."""
_LOOK = 0.02
_CHOSEN_WITHIN = 10.0
"""Seconds in which the ranks must have chosen the step that answers a request for a checkpoint. After that another one
does, while they train on."""


@dataclass(frozen=True)
class Hold:
    """A request to wait."""

    number: int
    resizes: bool
    """A world of another size follows."""
    copies: bool
    """Copies on other nodes are waited for."""
    stores: int = 0
    """The request for a checkpoint that the step answers, which is stored; 0 for none."""
    within: float = 0.0
    """Seconds that this may take."""


@dataclass(frozen=True, kw_only=True)
class HeldState:
    """What one checkpointer has saved for a request."""

    step: int
    saved: bool
    """Whether this rank has saved it."""
    replicated: bool
    """Every rank's state is the same."""
    arena: Arena
    """The snapshots of the node."""
    each_rank: Collection[str]
    """Names of the state that a rank of another world begins anew."""
    common: Collection[str]
    """Names of values of which a world of another size takes rank 0's."""
    complete: Completeness
    """Counts the ranks that have a step of the checkpointer."""


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The step at which all ranks wait, as rank 0 has chosen it."""

    leader: str
    """The checkpointer whose step it is: its save begins the turn of those that save at that step."""
    at: int
    """Its step when it was chosen."""
    step: int
    turn: Collection[str]
    """The checkpointers that save at each step."""


class _RankHolds:
    """What the checkpointers of one rank have saved for a request."""

    def __init__(self, turns: SaveTurns) -> None:
        self.turns = turns
        self.done = 0
        """The newest request that this rank has waited for."""
        self.seen = 0
        """The newest one that it has seen."""
        self.seen_at = 0.0
        self.choice: tuple[int, _Choice] | None = None
        """The choice for a request."""
        self.before: dict[str, HeldState] = {}
        """What was saved for it before the leader's save of that step."""
        self.held: dict[str, HeldState] = {}
        """What was saved for it since."""

    def add(self, name: str, state: HeldState) -> Mapping[str, HeldState] | None:
        """Adds what was saved; returns all that the rank then waits with, None as long as others are to save."""
        assert self.choice is not None
        choice = self.choice[1]
        again = name == choice.leader and name in self.held
        if name == choice.leader and not again:
            # Checkpointers that count the same steps may have saved this one before the leader.
            self.held = {other: one for other, one in self.before.items() if one.step == state.step}
        if name == choice.leader or choice.leader in self.held:
            self.held[name] = state
        else:
            self.before[name] = state
            return None
        # Where the leader saves again, the others do not save at each step.
        left = [other for other in choice.turn if other not in self.held and self.turns.has(other)]
        return self.held if again or not left else None

    def finish(self, number: int) -> None:
        """Records that the rank has waited."""
        self.done = number
        self.choice, self.before, self.held = None, {}, {}


_ranks: weakref.WeakValueDictionary[tuple[object, ...], _RankHolds] = weakref.WeakValueDictionary()
"""The ranks of this process, as long as they have a checkpointer."""


class PlannedHold:
    """One checkpointer's part in the waits of a world for changes that are planned.

    Invariants:
        - All ranks wait at the same step, or train on within bounded time.
        - No checkpointer of a rank that waits has made a step that is not saved, as far as they save in turn.
        - A world whose change is not requested pays one system call a step.
    """

    def __init__(self, own: RankIdentity, name: str, store: Store, link: StorageLink | None) -> None:
        """Creates the object.

        Args:
            own: This rank.
            name: The checkpointer's name.
            store: A connection to the generation's store that only this object uses, and that all checkpointers share.
            link: The node's agent; None where there is none.
        """
        self._own = own
        self._name = name
        self._store = store
        self._link = link
        self._rank = _ranks.setdefault((own.folder, own.generation, own.rank), _RankHolds(turns_of(own)))

    def due(self, step: int) -> Hold | None:
        """Returns the request for which this checkpointer saves `step`, whether it is due or not; None where there is
        none. Every rank calls it at each step, which is recorded before, and `wait` once it has saved."""
        rank = self._rank
        if self._link is None or (hold := self._requested()) is None or hold.number <= rank.done:
            return None
        try:
            choice = self._choice(hold, step)
        except RuntimeError:
            # The store has ended with its generation, and so will this process.
            return None
        if choice is None:
            return None
        if self._name == choice.leader:
            return hold if step >= choice.step else None
        # Every rank knows the choice by the leader's next step.
        return hold if rank.turns.step_of(choice.leader) > choice.at else None

    def is_stored(self, hold: Hold, step: int) -> bool:
        """Whether a step that `due` has returned the request for is the one with which this rank waits, and is stored.
        Those that save before the leader do not know it for sure, unless they count the same steps."""
        rank = self._rank
        if not hold.stores or rank.choice is None:
            return False
        leader = rank.choice[1].leader
        return self._name == leader or leader in rank.held or step == rank.choice[1].step

    @property
    def stores_soon(self) -> bool:
        """Whether a step at which the ranks will wait is stored, so that no other one need be before."""
        rank = self._rank
        if self._link is None or (hold := self._requested()) is None or not hold.stores or hold.number <= rank.done:
            return False
        if hold.number != rank.seen or (rank.choice is not None and rank.choice[0] == hold.number):
            return True
        return time.monotonic() < rank.seen_at + _CHOSEN_WITHIN

    def wait(self, hold: Hold, state: HeldState) -> None:
        """Waits, once all checkpointers have saved, until this process is ended; returns where it trains on."""
        rank = self._rank
        if (held := rank.add(self._name, state)) is None:
            return
        try:
            self._wait(hold, held)
        finally:
            rank.finish(hold.number)

    def _wait(self, hold: Hold, held: Mapping[str, HeldState]) -> None:
        until = time.monotonic() + LONGEST + hold.within - (0.0 if self._own.rank else MARGIN)
        with contextlib.suppress(RuntimeError):
            for name, state in held.items():
                if not state.saved:
                    self._tell(hold, "failed", f"rank {self._own.rank} has no room to save step {state.step:,}")
                elif hold.resizes and not state.replicated:
                    self._tell(hold, f"values/{name}/{self._own.rank}", self._values(state))
            if self._own.rank == 0:
                self._lead(hold, held, until)
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
        return Hold(
            number,
            resizes=bool(desired.get("hold_resizes")),
            copies=bool(desired.get("hold_copies")),
            stores=int(desired.get("hold_stores", 0)),
            within=float(desired.get("hold_within_s", 0.0)),
        )

    def _choice(self, hold: Hold, step: int) -> _Choice | None:
        """The step at which the ranks wait; None as long as none is chosen."""
        rank = self._rank
        if rank.choice is not None and rank.choice[0] == hold.number:
            return rank.choice[1]
        ready, chosen = self._key(hold, "ready"), self._key(hold, "step")
        if hold.number != rank.seen:
            rank.seen, rank.seen_at, rank.before, rank.held = hold.number, time.monotonic(), {}, {}
            # From now on this rank looks for the step at each step that it saves.
            self._store.add(ready, 1)
        if self._own.rank == 0 and self._store.add(ready, 0) >= self._own.world_size:
            if not (turn := rank.turns.turn_of(self._name)):
                return None
            made = _Choice(leader=self._name, at=step, step=step + _LEAD, turn=sorted(turn))
            self._store.set(chosen, json.dumps(asdict(made)))
        if not self._store.check([chosen]):
            return None
        rank.choice = hold.number, _Choice(**json.loads(self._store.get(chosen)))
        return rank.choice[1]

    def _lead(self, hold: Hold, held: Mapping[str, HeldState], until: float) -> None:
        """Reports, as rank 0, when the step is safe, and has all ranks train on where they are not ended then."""
        step, problem = held[self._name].step, self._problem(hold, held)
        if self._rank.choice is not None and (leader := self._rank.choice[1].leader) in held:
            step = held[leader].step
        report: Json = {
            "request": "held",
            "generation": self._own.generation,
            "number": hold.number,
            "step": step,
            "problem": problem,
        }
        assert self._link is not None
        try:
            self._link.insist(report, patience=REPORTED_WITHIN)
        except (StorageAway, StorageProblem) as error:
            problem = str(error)
        if problem:
            logger.warning("perdure: the ranks do not wait at step %d for a change that is planned: %s", step, problem)
        else:
            logger.warning("perdure: the ranks wait at step %d, as a change that is planned ends them", step)
            ended = min(time.monotonic() + ENDED_WITHIN + hold.within, until)
            while time.monotonic() < ended and self._requested() == hold:
                time.sleep(_LOOK)
        self._store.set(self._key(hold, "over"), "")

    def _problem(self, hold: Hold, held: Mapping[str, HeldState]) -> str:
        """Waits until what all checkpointers have saved is safe; returns why it is not."""
        until = time.monotonic() + SAFE_WITHIN
        for name, state in held.items():
            problem = self._until_safe(hold, state, until)
            if not problem and hold.resizes and not state.replicated:
                problem = self._differing(hold, name, state, until)
            if problem:
                return f"{name}: {problem}" if len(held) > 1 else problem
        return ""

    def _until_safe(self, hold: Hold, state: HeldState, until: float) -> str:
        """Waits until the step is whole; returns why it is not."""
        complete = state.complete
        safe: Callable[[int], bool] = complete.is_copied if hold.copies else complete.is_complete
        while not safe(state.step):
            if self._store.check([self._key(hold, "failed")]):
                return str(self._told(hold, "failed"))
            if hold.copies and complete.are_copies_refused():
                return "a node has no room for the copies of another node's snapshots"
            if time.monotonic() >= until:
                what = "its copies were not on other nodes" if hold.copies else "not all ranks had saved it"
                return f"{what} within {SAFE_WITHIN:.0f} s"
            time.sleep(_LOOK)
        return ""

    def _differing(self, hold: Hold, name: str, state: HeldState, until: float) -> str:
        """Why a world of another size could not load the step; empty if it can."""
        values: list[Any] = []
        for rank in range(self._own.world_size):
            key = f"values/{name}/{rank}"
            while not self._store.check([self._key(hold, key)]):
                if time.monotonic() >= until:
                    return f"rank {rank} did not say within {SAFE_WITHIN:.0f} s which values it has"
                time.sleep(_LOOK)
            values.append(self._told(hold, key))
        if problem := next((one for one in values if isinstance(one, str)), ""):
            return problem
        names = sorted(names_that_differ(values) - set(state.common))
        if not names:
            return ""
        first = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        verb = "differ" if len(names) > 1 else "differs"
        return f"{first} {verb} between ranks, and a world of another size cannot split that"

    def _values(self, state: HeldState) -> Any:
        """What tells whether the ranks have the same values: of those that are not split. Why that is not known."""
        own, until = self._own, time.monotonic() + SAFE_WITHIN
        while time.monotonic() < until:
            for slot, header in state.arena.snapshots():
                if (header.step, header.rank, header.generation) == (state.step, own.rank, own.generation):
                    try:
                        return FormerSnapshot(slot, own.rank, each_rank=frozenset(state.each_rank)).whole_values()
                    except (ValueError, KeyError, OSError) as error:
                        return f"rank {own.rank}: {error}"
            # Another thread makes it valid.
            time.sleep(_LOOK)
        return f"the snapshot of rank {own.rank} was not valid within {SAFE_WITHIN:.0f} s"

    def _key(self, hold: Hold, name: str) -> str:
        return f"hold/{hold.number}/{name}"

    def _tell(self, hold: Hold, name: str, value: object) -> None:
        # The type stub of `Store.set` does not list bytes.
        self._store.set(self._key(hold, name), cast("Any", pickle.dumps(value)))

    def _told(self, hold: Hold, name: str) -> Any:
        return pickle.loads(self._store.get(self._key(hold, name)))
