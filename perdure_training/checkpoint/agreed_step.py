"""How all ranks of a new world come to load the same step: they tell rank 0 what they hold, and follow its decision."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from perdure_training.checkpoint.direct import MORE_MEMORY
from perdure_training.checkpoint.other_states import OtherStates
from perdure_training.checkpoint.slots import Slots
from perdure_training.checkpoint.verification import problem_of
from perdure_training.checkpoint.world import RankIdentity
from perdure_training.snapshots.agreement import Decision, Holding, decide
from perdure_training.snapshots.arena import Arena, Header, NoRoom, Slot
from perdure_training.snapshots.findings import DAMAGED, UNREADABLE, Finding, Look, find_obstacles

logger = logging.getLogger(__name__)

ADOPTED = "adopted"
"""The origin of a memory folder that a killed launcher of the node has left."""


@dataclass(frozen=True, kw_only=True)
class AgreedStep:
    """What the ranks have agreed to load, and this rank's part in it."""

    decision: Decision
    snapshots: Mapping[int, Slot]
    """The verified snapshots of that step that this rank loads, sends, or gives parts of, by the rank whose state they
    are."""
    room: Slot | None
    """The slot for the snapshot that another rank sends to this one; None if this rank has its own."""
    made_before: int | None
    """On rank 0: the newest step that the last world has made."""
    obstacles: Sequence[Finding]
    """On rank 0: what was damaged, and, if no step is loaded, why not."""
    complete: int | None = None
    """On rank 0: the newest sound step that all ranks of an earlier world had, as far as nodes remember it."""
    seen: int | None = None
    """On rank 0: the newest step of which a rank's snapshot is on any node."""

    def loaded(self, own: int) -> Slot:
        """The slot with the snapshot that this rank loads, once the others have sent theirs."""
        return self.room or self.snapshots[own]

    def without_step(self) -> AgreedStep:
        """The same, where that step cannot be loaded."""
        return replace(self, decision=replace(self.decision, step=None, sources={}, former=None, holders={}))

    def sent(self, own: int) -> dict[int, Slot]:
        """The snapshots that this rank sends, by receiver."""
        receivers = [receiver for receiver, sender in self.decision.sources.items() if sender == own]
        return {receiver: self.snapshots[_spoken_for(receiver, self.snapshots)] for receiver in receivers}


def agree_on_step(
    own: RankIdentity,
    arena: Arena,
    slots: Slots,
    store: Store,
    *,
    last_made: tuple[int, int] | None,
    last_complete: tuple[int, int] | None = None,
    stored: int | None = None,
    last_resort: bool = False,
    others: OtherStates | None = None,
) -> AgreedStep:
    """Tells all ranks what this one found, and follows the decision of rank 0. Every rank of the world calls it.

    Checksums take longer than everything else, so only what is loaded or sent is verified. If one of them is damaged,
    or a rank has no room to receive one, all ranks decide again without it.

    Args:
        own: This rank.
        arena: The snapshots on this node.
        slots: Those of this rank.
        store: A connection to the generation's store.
        last_made: The newest generation that made steps on this node, and the newest of these, as far as this rank
            speaks for the node.
        last_complete: The same of the steps that all ranks had in memory.
        stored: As rank 0: the step of the checkpoint in storage that the job knows; None for none.
        last_resort: As in `decide`: the ranks agree once more, since storage has nothing either.
        others: The states of other checkpointers, which are to continue from the same step; None for none.
    """
    store = PrefixStore(f"agreed-{last_resort:d}/", store)
    made_before: int | None = None
    obstacles: list[Finding] = []
    complete: int | None = None
    seen: int | None = None
    lost: dict[str, list[tuple[int, int]]] = {DAMAGED: [], UNREADABLE: []}
    passed_over: set[Path] = set()
    full = False
    for attempt in itertools.count():
        found = [one for one in _assigned_snapshots(own, arena) if one[0].path not in passed_over]
        holdings = [Holding.of(header).fields() for _, header in found]
        report = {"holdings": holdings, "full": full, "made": last_made, "complete": last_complete}
        report |= {"node": own.node, "origin": own.memory_origin, **lost}
        if others is not None:
            report |= {"others": others.report(lambda arena: [header for _, header in _assigned_snapshots(own, arena)])}
        gathered = _gather(own, store, f"held/{attempt}", json.dumps(report))
        if gathered is not None:
            reports = [json.loads(text) for text in gathered]
            held = {rank: [Holding(**one) for one in report["holdings"]] for rank, report in enumerate(reports)}
            without_room = [rank for rank, report in enumerate(reports) if report["full"]]
            made_before = max((report["made"] for report in reports if report["made"]), default=(0, None))[1]
            decided = partial(
                decide,
                held,
                own.world_size,
                full=without_room,
                unsound=own.unsound,
                script_failures=own.script_failures,
                last_resort=last_resort,
            )
            made_decision = decided()
            complete = None if made_decision.distrusted else _newest_complete(own, reports, held)
            of_all = others.steps([one.get("others", {}) for one in reports], unsound=own.unsound) if others else None
            if of_all and (together := decided(only=of_all)).step is not None:
                # A newer one that only this checkpointer has is not lost: its training has not gone beyond it.
                made_decision = together
                complete = together.step if complete is not None else None
            seen = max((one.step for some in held.values() for one in some), default=None)
            made_decision = replace(
                made_decision,
                existed=max((step for step in (stored, complete) if step is not None), default=None),
                may_be_old=any(report.get("origin") == ADOPTED for report in reports),
            )
            looks = {rank: _look(report, held[rank]) for rank, report in enumerate(reports)}
            obstacles = find_obstacles(looks, own.world_size, made_decision, full=without_room, unsound=own.unsound)
            store.set(f"decision/{attempt}", json.dumps(made_decision.fields()))
        fields = json.loads(store.get(f"decision/{attempt}"))
        sources = {int(rank): source for rank, source in fields.pop("sources").items()}
        holders = {int(rank): holder for rank, holder in fields.pop("holders").items()}
        decision = Decision(**fields, sources=sources, holders=holders)
        version = (decision.step, decision.generation)
        chosen = {header.rank: slot for slot, header in found if (header.step, header.generation) == version}
        needed = {_spoken_for(receiver, chosen) for receiver, sender in sources.items() if sender == own.rank}
        has_own = decision.step is not None and not holders and own.rank not in sources
        if has_own:
            needed.add(_spoken_for(own.rank, chosen))
        needed |= {rank for rank, holder in holders.items() if holder == own.rank}
        # Parts of a former world's snapshots are read on every node that has them.
        problems = {rank: problem_of(chosen[rank]) for rank in sorted(chosen if holders else needed)}
        for rank, problem in problems.items():
            if problem and decision.step is not None:
                lost[problem].append((rank, decision.step))
                passed_over.add(chosen[rank].path)
        ready = not any(problems[rank] for rank in needed)
        room: Slot | None = None
        if ready and own.rank in sources:
            room = _make_room(own, slots, decision.size)
            ready, full = room is not None, room is None
        verdicts = _gather(own, store, f"ready/{attempt}", json.dumps(ready))
        if verdicts is not None:
            store.set(f"verdict/{attempt}", json.dumps(all(json.loads(verdict) for verdict in verdicts)))
        if json.loads(store.get(f"verdict/{attempt}")):
            snapshots = {rank: chosen[rank] for rank in needed}
            if has_own and not slots.has(chosen[(mine := _spoken_for(own.rank, chosen))]):
                # A replicated state of another rank, or a file with the name that an earlier release gave it: a node
                # keeps what it has.
                slots.reload()
                snapshots[own.rank] = slots.take_over(snapshots.pop(mine), world_size=own.world_size)
            return AgreedStep(
                decision=decision,
                snapshots=snapshots,
                room=room,
                made_before=made_before,
                obstacles=obstacles,
                complete=complete,
                seen=seen,
            )
    raise AssertionError("each further decision lacks a snapshot or a receiver, until none is left")


def _newest_complete(
    own: RankIdentity, reports: Sequence[Mapping[str, Any]], held: Mapping[int, Sequence[Holding]]
) -> int | None:
    """The newest step that all ranks of an earlier world had; None if that may not be loaded any more."""
    generation, step = max((tuple(one["complete"]) for one in reports if one.get("complete")), default=(0, None))
    if own.unsound is None or step is None:
        return step
    left = [one for some in held.values() for one in some if (one.step, one.generation) == (step, generation)]
    unsound = own.unsound.has(generation=generation, step=step) or any(one.is_unsound(own.unsound) for one in left)
    return None if unsound else step


def _look(report: Mapping[str, Any], holdings: Sequence[Holding]) -> Look:
    """What a rank found, which may have the library of an older release."""
    damaged, unreadable = (
        [(int(rank), int(step)) for rank, step in report.get(problem, ())] for problem in (DAMAGED, UNREADABLE)
    )
    node, origin = report.get("node"), report.get("origin", "")
    return Look(node=node, origin=origin, holdings=holdings, damaged=damaged, unreadable=unreadable)


def _make_room(own: RankIdentity, slots: Slots, size: int) -> Slot | None:
    """Prepares a slot for a snapshot that another rank sends; None if the memory is too small for it."""
    slots.reload()
    try:
        slot = slots.free_slot()
        try:
            slot.begin(size)
        except NoRoom:
            slot.clear()
            raise
    except OSError as error:
        logger.warning("perdure: rank %d takes no snapshot from another node: %s. %s", own.rank, error, MORE_MEMORY)
        return None
    return slot


def _gather(own: RankIdentity, store: Store, key: str, value: str) -> list[bytes] | None:
    """Tells rank 0 a value; returns all ranks' values there, None elsewhere."""
    store.set(f"{key}/{own.rank}", value)
    if own.rank:
        return None
    return [store.get(f"{key}/{rank}") for rank in range(own.world_size)]


def _assigned_snapshots(own: RankIdentity, arena: Arena) -> list[tuple[Slot, Header]]:
    """The snapshots on this node that this rank speaks for: its own, and a share of those of ranks that are on other
    nodes now."""
    local = own.ranks_of_node
    return [
        (slot, header)
        for slot, header in arena.snapshots()
        if own.rank == (header.rank if header.rank in local else local[header.rank % len(local)])
    ]


def _spoken_for(receiver: int, chosen: Collection[int]) -> int:
    """The rank whose snapshot is sent: the receiver's own, else any, since the state is replicated then."""
    return receiver if receiver in chosen else min(chosen)
