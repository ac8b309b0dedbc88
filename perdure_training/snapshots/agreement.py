"""Decides which step all ranks of a new world load, from what all of them hold.

One rank decides for all, so that no two ranks load different steps. A decision made before the world begins could not
know what the survivors hold, since they step until torchrun restarts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.snapshots.arena import Header

TRUSTED_RESTORES = 3
"""The number of worlds that may load a snapshot and fail by the script. A further one before a newer snapshot is
complete would speak against its content: an older one is loaded then, if there is one."""

_LAST_RESORT = ", although the job failed after each load of it: there is no other state"


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A snapshot, verified by the rank that found it on its node."""

    rank: int
    """The rank whose state it is."""
    step: int
    generation: int
    """The generation that saved it. Two generations may save a step of the same number with other content."""
    world_size: int
    replicated: bool
    size: int
    """Number of bytes."""
    restores: int
    reported: int | None = None
    """As in its header."""

    @classmethod
    def of(cls, header: Header) -> Holding:
        """What a header says."""
        return cls(**{name: getattr(header, name) for name in cls.__dataclass_fields__})

    def fields(self) -> dict[str, Any]:
        """The holding as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "reported" or value is not None}

    def is_unsound(self, unsound: UnsoundSteps | None) -> bool:
        """Whether it is one of the saved states that are not loaded."""
        return unsound is not None and unsound.has(
            generation=self.generation, step=judged_step(self.step, self.reported)
        )


def judged_step(step: int, reported: int | None) -> int:
    """The step of a saved state that is compared with those whose losses are not numbers: the later one where a script
    counts what it saves otherwise than what it reports. So no spoiled state counts as an older one."""
    return step if reported is None else max(step, reported)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the ranks of a world load."""

    step: int | None
    """None if no step can be loaded by all of them."""
    generation: int = 0
    """The generation that saved it."""
    size: int = 0
    """Bytes of the largest rank's snapshot: room for that many is enough for any."""
    sources: Mapping[int, int]
    """For each rank that lacks the snapshot: the rank that sends it."""
    reason: str
    """One line for people."""
    distrusted: Collection[int] = ()
    """Newer steps that were not chosen because the job failed again after each load."""
    former: int | None = None
    """The size of the world that saved it, where that is another one and each rank takes its part anew."""
    holders: Mapping[int, int] = field(default_factory=dict[int, int])
    """For each rank of that former world: the rank that gives the others parts of its snapshot."""
    restores: int = 0
    """The number of worlds that have loaded it before."""
    reported: int | None = None
    """As in its header."""
    existed: int | None = None
    """The newest step that is known to have existed; None where none is."""
    may_be_old: bool = False
    """What is in memory was left by a killed launcher, and may be older than what was trained elsewhere since."""

    def fields(self) -> dict[str, Any]:
        """The decision as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "reported" or value is not None}

    @property
    def is_behind(self) -> bool:
        """Whether a newer step is known to have existed."""
        return self.step is not None and self.existed is not None and self.existed > self.step


@dataclass
class _Saved:
    """What is left of one step that one generation saved."""

    holders: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """For each rank whose state is left: the ranks of the new world that found it."""
    former: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """The same for the ranks of a world of another size."""
    world_size: int = 0
    """The size of that world."""
    replicas: set[int] = field(default_factory=set[int])
    """The ranks of the new world that found a state that serves any rank."""
    size: int = 0
    restores: int = 0
    reported: int | None = None
    is_unsound: bool = False


def decide(
    held: Mapping[int, Iterable[Holding]],
    world_size: int,
    *,
    full: Collection[int] = (),
    unsound: UnsoundSteps | None = None,
    script_failures: Collection[int] | None = None,
    last_resort: bool = False,
    only: Collection[int] | None = None,
) -> Decision:
    """Decides what a world loads.

    Args:
        held: The snapshots that each rank of the new world found on its node.
        world_size: The size of the new world.
        full: The ranks that have no room for a snapshot from another rank.
        unsound: The saved states that are not loaded; None for none.
        script_failures: The generations that the script's own failures have ended: other ends, such as the loss of a
            machine or a user's restart, say nothing about what was loaded. None where that is not known.
        last_resort: Whether the oldest of the distrusted ones is loaded, as there is nothing else: to begin anew would
            cost the whole training.
        only: The steps that may be loaded; None for all.
    """
    saved = _by_version(held, world_size, unsound=unsound)
    distrusted: list[int] = []
    for (step, generation), entry in sorted(saved.items(), reverse=not last_resort):
        if only is not None and step not in only:
            continue
        if entry.is_unsound:
            continue
        sources = _sources(entry, world_size)
        holders = {} if sources is not None else _holders(entry)
        if holders is None or (sources is not None and not sources.keys().isdisjoint(full)):
            continue
        if not last_resort and _failed_after(entry, generation, script_failures) >= TRUSTED_RESTORES:
            distrusted.append(step)
            continue
        return Decision(
            step=step,
            generation=generation,
            size=entry.size,
            sources=sources or {},
            reason=_reason(step, sources or {}, distrusted, former=entry.world_size if holders else None)
            + (_LAST_RESORT if last_resort else ""),
            distrusted=distrusted,
            former=entry.world_size if holders else None,
            holders=holders,
            restores=entry.restores,
            reported=entry.reported,
        )
    if distrusted:
        steps = ", ".join(map(str, distrusted))
        reason = f"step {steps} failed again after each load: not loaded"
        return Decision(step=None, sources={}, reason=reason, distrusted=distrusted)
    return Decision(step=None, sources={}, reason="no step is in memory for all ranks" if held_any(held) else "")


def loadable_steps(
    held: Mapping[int, Iterable[Holding]], world_size: int, *, unsound: UnsoundSteps | None = None
) -> set[int]:
    """Returns the steps of which enough is left for a world of this size; see `decide` for the arguments."""
    return {
        step
        for (step, _), entry in _by_version(held, world_size, unsound=unsound).items()
        if not entry.is_unsound and (_sources(entry, world_size) is not None or _holders(entry) is not None)
    }


def _by_version(
    held: Mapping[int, Iterable[Holding]], world_size: int, *, unsound: UnsoundSteps | None = None
) -> dict[tuple[int, int], _Saved]:
    """What is left of each step of each generation."""
    saved: dict[tuple[int, int], _Saved] = {}
    for holder, holdings in sorted(held.items()):
        for one in holdings:
            entry = saved.setdefault((one.step, one.generation), _Saved())
            entry.restores = max(entry.restores, one.restores)
            entry.size = max(entry.size, one.size)
            # Perhaps only one of the ranks reports losses.
            entry.is_unsound = entry.is_unsound or one.is_unsound(unsound)
            if one.reported is not None:
                entry.reported = max(entry.reported or 0, one.reported)
            if one.replicated:
                entry.replicas.add(holder)
            if one.replicated or one.world_size == world_size:
                entry.holders.setdefault(one.rank, set()).add(holder)
            else:
                entry.former.setdefault(one.rank, set()).add(holder)
                entry.world_size = one.world_size
    return saved


def held_any(held: Mapping[int, Iterable[Holding]]) -> bool:
    """Whether any rank found a snapshot."""
    return any(list(holdings) for holdings in held.values())


def _failed_after(saved: _Saved, generation: int, script_failures: Collection[int] | None) -> int:
    """How many worlds have loaded a snapshot and failed by the script."""
    if script_failures is None:
        return saved.restores
    return min(saved.restores, sum(failed > generation for failed in script_failures))


def _sources(saved: _Saved, world_size: int) -> dict[int, int] | None:
    """The senders of a step's missing snapshots; None if one cannot be had."""
    sources: dict[int, int] = {}
    for rank in range(world_size):
        candidates = saved.holders.get(rank) or saved.replicas
        if not candidates:
            return None
        if rank not in candidates:
            # Different senders for different receivers share the work.
            ordered = sorted(candidates)
            sources[rank] = ordered[rank % len(ordered)]
    return sources


def _holders(saved: _Saved) -> dict[int, int] | None:
    """For each rank of a world of another size, who gives others what is left of it; None if something is missing."""
    if not saved.former or len(saved.former) < saved.world_size:
        return None
    burdens: Counter[int] = Counter()
    holders: dict[int, int] = {}
    # Those first of which there is one: the others can be had elsewhere.
    for rank, candidates in sorted(saved.former.items(), key=lambda found: (len(found[1]), found[0])):
        holders[rank] = min(candidates, key=lambda holder: (burdens[holder], holder))
        burdens[holders[rank]] += 1
    return holders


def _reason(step: int, sources: Mapping[int, int], distrusted: Collection[int], *, former: int | None = None) -> str:
    text = f"step {step} from memory"
    if former is not None:
        text += f", split anew: {former} ranks saved it"
    if sources:
        text += f", {len(sources)} of the ranks from another node"
    if distrusted:
        text += f"; newer steps failed again after each load: {', '.join(map(str, distrusted))}"
    return text
