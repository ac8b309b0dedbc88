"""Finds the rank that others wait for in what torch's flight recorder tells of the collectives of all ranks: calls look
alike where a rank has left one out, and sequence numbers do not.

A rank in a collective waits for those of its process group that have not come to it: they are before it, or in another
one of the same number. Where they wait as well, in turn for others, no one can continue. The recorder is one witness:
what it says of where a rank is must not contradict the rank's calls (`hangs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from perdure.contract import CollectiveCall

_SAME_ELEMENTS = ("all_reduce", "broadcast")
"""Collectives to which each rank of a group gives the same number of elements."""
_ALL_NEEDED = "all_reduce"
"""Collectives that end on no device before they have begun on all."""


@dataclass(frozen=True)
class Comparison:
    """What the collectives of all ranks show together."""

    waited_for: frozenset[int]
    """The ranks that have not come to a collective, and wait in none: the others wait for them."""
    crossed: bool
    """Each rank waits, and for one that waits elsewhere."""
    apart: frozenset[int]
    """Where they cross, the ranks that most others wait for; empty where it is as many for each side."""
    same_number: bool
    """Where they cross, different collectives have the same number in their group: that is no matter of time."""
    awaited: CollectiveCall | None
    """The collective in which most ranks wait."""
    other: CollectiveCall | None
    """Another collective, in which most of the others wait; None where all wait in the same."""


def compare(ranks: Mapping[int, Sequence[CollectiveCall]]) -> Comparison | None:
    """Compares where the ranks of a world are.

    Args:
        ranks: The position of each rank in each of its process groups.

    Returns:
        None where a rank does not tell it, or none waits.
    """
    open_calls = {rank: [call for call in calls if not call.ended] for rank, calls in ranks.items()}
    if not all(ranks.values()) or not any(open_calls.values()):
        return None
    members: dict[tuple[str, str], list[tuple[int, CollectiveCall]]] = {}
    for rank, calls in ranks.items():
        for call in calls:
            members.setdefault((call.group, call.backend), []).append((rank, call))
    same_number = False
    waits_for: dict[int, set[int]] = {rank: set() for rank in ranks}
    for rank, calls in open_calls.items():
        for call in calls:
            for other, theirs in members[call.group, call.backend]:
                differs = not theirs.ended and theirs.sequence == call.sequence and not _match(theirs, call)
                same_number = same_number or differs
                if differs or theirs.sequence < call.sequence or _has_ended_alone(theirs, call):
                    waits_for[rank].add(other)
    wanted = Counter(other for others in waits_for.values() for other in others)
    crossed = all(waits_for.values())
    apart = _wanted_most(wanted, len(ranks)) if crossed else frozenset[int]()
    # Of several, the oldest of the group that the rank called last.
    waits_in = {rank: calls[0] for rank, calls in open_calls.items() if calls}
    awaited = _most_common(call for rank, call in waits_in.items() if rank not in apart)
    return Comparison(
        waited_for=frozenset(rank for rank in wanted if not open_calls[rank]),
        crossed=crossed,
        apart=apart,
        same_number=crossed and same_number,
        awaited=awaited,
        other=_most_common(call for call in waits_in.values() if call != awaited),
    )


def words(call: CollectiveCall) -> str:
    """Names a collective for people."""
    sizes = f" of {call.sizes}" if call.sizes else ""
    return f"{call.name.rpartition(':')[2]}{sizes}, number {call.sequence:,} of process group {call.group}"


def _match(one: CollectiveCall, other: CollectiveCall) -> bool:
    """Whether two ranks can be in the same collective with these calls."""
    if one.name != other.name:
        return False
    return one.elements == other.elements or not one.name.endswith(_SAME_ELEMENTS)


def _has_ended_alone(one: CollectiveCall, other: CollectiveCall) -> bool:
    """Whether a rank has ended the collective in which another rank waits, although neither can end without the other:
    NCCL's ends on the rank with the smaller tensor, where sizes differ."""
    all_needed = other.on_device and other.name.endswith(_ALL_NEEDED)
    return all_needed and (one.sequence > other.sequence or (one.sequence == other.sequence and one.ended))


def _wanted_most(wanted: Counter[int], total: int) -> frozenset[int]:
    """The ranks that most others wait for, if they are fewer than those."""
    most = max(wanted.values(), default=0)
    ranks = frozenset(rank for rank, count in wanted.items() if count == most)
    return ranks if 2 * len(ranks) < total else frozenset()


def _most_common(calls: Iterable[CollectiveCall]) -> CollectiveCall | None:
    found = Counter(calls).most_common(1)
    return found[0][0] if found else None
