"""Decides which step all ranks of a new world load, from what all of them hold.

One rank decides for all, so that no two ranks load different steps. A decision made before the world begins could not
know what the survivors hold, since they step until torchrun restarts them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

TRUSTED_RESTORES = 3
"""The number of worlds that may load a snapshot. A further failure before a newer snapshot is complete speaks against
its content: an older one is loaded then."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A snapshot, verified by the rank that found it on its node."""

    rank: int
    """The rank whose state it is."""
    step: int
    world_size: int
    replicated: bool
    restores: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the ranks of a world load."""

    step: int | None
    """None if no step can be loaded by all of them."""
    sources: Mapping[int, int]
    """For each rank that lacks the snapshot: the rank that sends it."""
    reason: str
    """One line for people."""


def decide(held: Mapping[int, Iterable[Holding]], world_size: int) -> Decision:
    """Decides what a world loads.

    Args:
        held: The snapshots that each rank of the new world found on its node.
        world_size: The size of the new world.
    """
    holders: dict[int, dict[int, set[int]]] = {}
    replicas: dict[int, set[int]] = {}
    restores: dict[int, int] = {}
    for holder, holdings in sorted(held.items()):
        for one in holdings:
            restores[one.step] = max(restores.get(one.step, 0), one.restores)
            if one.replicated:
                replicas.setdefault(one.step, set()).add(holder)
            if one.replicated or one.world_size == world_size:
                holders.setdefault(one.step, {}).setdefault(one.rank, set()).add(holder)
    distrusted: list[int] = []
    for step in sorted(holders, reverse=True):
        sources = _sources(holders[step], replicas.get(step, ()), world_size)
        if sources is None:
            continue
        if restores[step] >= TRUSTED_RESTORES:
            distrusted.append(step)
            continue
        return Decision(step=step, sources=sources, reason=_reason(step, sources, distrusted))
    if distrusted:
        steps = ", ".join(map(str, distrusted))
        return Decision(step=None, sources={}, reason=f"step {steps} failed again after each load: not loaded")
    return Decision(step=None, sources={}, reason="no step is in memory for all ranks" if held_any(held) else "")


def held_any(held: Mapping[int, Iterable[Holding]]) -> bool:
    """Whether any rank found a snapshot."""
    return any(list(holdings) for holdings in held.values())


def _sources(
    holders: Mapping[int, Collection[int]], replicas: Collection[int], world_size: int
) -> dict[int, int] | None:
    """The senders of a step's missing snapshots; None if one cannot be had."""
    sources: dict[int, int] = {}
    for rank in range(world_size):
        candidates = holders.get(rank) or replicas
        if not candidates:
            return None
        if rank not in candidates:
            # Different senders for different receivers share the work.
            ordered = sorted(candidates)
            sources[rank] = ordered[rank % len(ordered)]
    return sources


def _reason(step: int, sources: Mapping[int, int], distrusted: Collection[int]) -> str:
    text = f"step {step} from memory"
    if sources:
        text += f", {len(sources)} of the ranks from another node"
    if distrusted:
        text += f"; newer steps failed again after each load: {', '.join(map(str, distrusted))}"
    return text
