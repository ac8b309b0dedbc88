"""What the ranks of a new world found in memory and could not load, so that the incident can say why memory was not
used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.snapshots.agreement import Decision, Holding

_MOST_RANKS = 4
"""Ranks whose findings are reported. The others of a large world have lost their snapshots in the same way."""
_MOST_NODES = 4
"""Nodes of which a rank's findings are reported."""
_MOST_STEPS = 4

MISSING = "missing"
"""The node has no snapshot of the rank."""
DAMAGED = "damaged"
"""Its bytes are not the ones that were written."""
UNREADABLE = "unreadable"
"""It cannot be read now."""
OTHER_WORLD_SIZE = "other_world_size"
"""It is one part of the state of a world of another size."""
NOT_COMMON = "not_common"
"""It is sound, and some rank lacks this step."""
UNSOUND = "unsound"
"""It may not be sound: a loss that was not a number followed from it, or a rank had computed wrongly."""
NO_ROOM = "no_room"
"""The node has no room for the snapshot that another node would send."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one rank found on its node."""

    node: int | None = None
    """The node (slot); None where that is unknown."""
    origin: str = ""
    """Where the node's memory folder comes from, as the launcher says; empty where that is unknown."""
    holdings: Iterable[Holding] = ()
    damaged: Collection[tuple[int, int]] = ()
    """Snapshots that were found damaged, and are deleted: the rank whose state it was, and the step."""
    unreadable: Collection[tuple[int, int]] = ()
    """Those that could not be read."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why what one node has of one rank's state is not loaded."""

    rank: int
    """The rank whose state it is."""
    node: int | None
    problem: str
    steps: tuple[int, ...] = ()
    """The snapshots' steps, the newest first."""
    origin: str = ""
    """As in `Look`, where the node has no snapshot."""


def find_obstacles(
    looks: Mapping[int, Look],
    world_size: int,
    decision: Decision,
    *,
    full: Collection[int] = (),
    unsound: UnsoundSteps | None = None,
) -> list[Finding]:
    """Finds out why memory is not used, as far as it is not; what is damaged, in any case.

    Args:
        looks: What each rank of the new world found on its node.
        world_size: The size of the new world.
        decision: What all ranks load.
        full: The ranks that have no room for a snapshot from another rank.
        unsound: The saved states that are not loaded; None for none.
    """
    damaged = {rank for look in looks.values() for rank, _ in (*look.damaged, *look.unreadable)}
    if decision.step is not None:
        ranks = sorted(damaged)[:_MOST_RANKS]
        return [finding for rank in ranks for finding in _damages(looks.values(), rank)[:_MOST_NODES]]
    sound = [replace(look, holdings=_sound(look.holdings, unsound)) for look in looks.values()]
    nearest = _nearest(sound, world_size)
    lacking = [rank for rank in range(world_size) if rank in damaged or rank not in nearest]
    found = [finding for rank in lacking[:_MOST_RANKS] for finding in _of_rank(looks, rank, world_size, unsound)]
    without_room = [
        Finding(rank=rank, node=looks[rank].node, problem=NO_ROOM) for rank in sorted(full) if rank in looks
    ]
    return without_room[:_MOST_RANKS] + found


def _nearest(looks: Iterable[Look], world_size: int) -> Collection[int]:
    """The ranks that have the step, as one generation saved it, which the most of them have or had undamaged."""
    ranks: dict[tuple[int, int], set[int]] = {}
    damaged: dict[int, set[int]] = {}
    for look in looks:
        for rank, step in (*look.damaged, *look.unreadable):
            damaged.setdefault(step, set()).add(rank)
        for one in look.holdings:
            if one.replicated:
                return range(world_size)
            if one.world_size == world_size:
                ranks.setdefault((one.step, one.generation), set()).add(one.rank)
    versions = sorted(ranks, reverse=True)
    nearest = max(versions, key=lambda version: len(ranks[version] | damaged.get(version[0], set())), default=None)
    return ranks[nearest] if nearest else ()


def _sound(holdings: Iterable[Holding], unsound: UnsoundSteps | None) -> list[Holding]:
    return [one for one in holdings if not one.is_unsound(unsound)]


def _of_rank(looks: Mapping[int, Look], rank: int, world_size: int, unsound: UnsoundSteps | None) -> list[Finding]:
    """Why what all nodes have of one rank's state is not loaded."""
    found = _damages(looks.values(), rank)
    steps: dict[tuple[int | None, str], set[int]] = {}
    for look in looks.values():
        sound = _sound(look.holdings, unsound)
        for one in look.holdings:
            if one.rank == rank:
                problem = NOT_COMMON if one.world_size == world_size else OTHER_WORLD_SIZE
                problem = problem if one in sound else UNSOUND
                steps.setdefault((look.node, problem), set()).add(one.step)
    found += [
        Finding(rank=rank, node=node, problem=problem, steps=_newest(some)) for (node, problem), some in steps.items()
    ]
    own = looks.get(rank, Look())
    if own.node not in {one.node for one in found}:
        found.insert(0, Finding(rank=rank, node=own.node, problem=MISSING, origin=own.origin))
    return found[:_MOST_NODES]


def _damages(looks: Iterable[Look], rank: int) -> list[Finding]:
    """The snapshots of one rank's state that were damaged or could not be read, of each node."""
    steps: dict[tuple[int | None, str], set[int]] = {}
    for look in looks:
        for problem, snapshots in ((DAMAGED, look.damaged), (UNREADABLE, look.unreadable)):
            for of, step in snapshots:
                if of == rank:
                    steps.setdefault((look.node, problem), set()).add(step)
    return [
        Finding(rank=rank, node=node, problem=problem, steps=_newest(some)) for (node, problem), some in steps.items()
    ]


def _newest(steps: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(steps, reverse=True)[:_MOST_STEPS])
