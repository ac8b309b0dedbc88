"""Finds ranks for which all others wait, step after step: in synchronous training nobody is faster than the slowest.

Ranks are compared with each other at the same time, never with their own past: where all become slower together,
because sequences grow or a storage is slow, no rank stands out. What a rank computes longer must be seen as a wait of
the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from perdure.contract import RankStepTimes, Straggler

FEWEST_RANKS = 3
"""Of two ranks with different times, either may be the unusual one."""
SHARE_OF_STEP = 0.1
"""What a rank must cost the others of each step: data differ in length from rank to rank, too."""
DEVIATIONS = 5
"""By how many median deviations of the others it must stand out."""
SEEN_AS_WAIT = 0.5
"""The share of its longer computation by which it must wait for a shorter time than the others."""
MOST_OF_RANKS = 0.25
"""Where more of the ranks stand out, and not those of one node, they have other work, as the stages of a pipeline
have."""


def find(times: Sequence[RankStepTimes], nodes: Mapping[int, int] | None = None) -> list[Straggler]:
    """Returns the ranks that compute for longer than the others while these wait, the slowest first.

    Args:
        times: How the steps of all ranks split.
        nodes: The node (slot) of each rank, where nodes have several.
    """
    found = [slow for one in times if (slow := _compare(one, [other for other in times if other is not one]))]
    if len(found) > max(1, MOST_OF_RANKS * len(times)) and not _are_one_node(found, nodes or {}):
        return []
    return sorted(found, key=lambda slow: slow.usual - slow.compute)


def describe(found: Straggler) -> str:
    """Describes a slow rank, for people."""
    where = f"on node {found.node}" + (f" ({found.host})" if found.host else "")
    factor = found.compute / found.usual if found.usual else 0.0
    longer = f", {factor:.2f} times as long" if factor else ""
    why = f"; the clocks of its GPU are reduced ({found.slowed}), and those of most others are not"
    return (
        f"rank {found.rank} {where} computes for {_seconds(found.compute)} a step and the others for "
        f"{_seconds(found.usual)}{longer}; they wait for it, {round(60 * found.lost)} min of each hour"
        f"{why if found.slowed else ''}"
    )


def _compare(one: RankStepTimes, others: Sequence[RankStepTimes]) -> Straggler | None:
    if len(others) + 1 < FEWEST_RANKS:
        return None
    usual = median(other.compute for other in others)
    deviation = median(abs(other.compute - usual) for other in others)
    longer, step = one.compute - usual, one.compute + one.wait + one.rest
    waits = median(other.wait for other in others) - one.wait
    if longer < max(SHARE_OF_STEP * step, DEVIATIONS * deviation) or longer <= 0 or waits < SEEN_AS_WAIT * longer:
        return None
    alike = sum(other.slowed == one.slowed for other in others)
    slowed = one.slowed if 2 * alike < len(others) else ""
    return Straggler(rank=one.rank, compute=one.compute, usual=usual, lost=longer / step, slowed=slowed)


def _are_one_node(found: Sequence[Straggler], nodes: Mapping[int, int]) -> bool:
    """Whether these are all ranks of one node, and at most half of all."""
    slow = {one.rank for one in found}
    owners = {nodes.get(rank) for rank in slow}
    return (
        len(owners) == 1
        and slow == {rank for rank, node in nodes.items() if node in owners}
        and (2 * len(slow) <= len(nodes))
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
