"""Judges which rank computed wrongly, from the checksums of computations that several ranks have made.

A fault of one device explains that one rank's results are odd. So a rank is named only if everything that the others
have computed agrees, and anything else is no fault of a device: a step that is not deterministic differs with itself
on more than one rank, sooner or later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CONFIRMATIONS = 4
"""Further replays after two results differ, if the odd rank's own results agree with each other."""
_RESULTS = 64
"""Results that the ranks make before one is named whose own results differ. Of a step that differs with itself once in
fifteen times, so many would agree once in a hundred times."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The checksum of one rank's share of a step, as one rank has computed it."""

    owner: int
    """The rank whose share it is."""
    by: int
    """The rank that has computed it."""
    checksum: int
    is_replay: bool = True
    """False for the computation whose result the training uses."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What explains results that differ."""

    ranks: tuple[int, ...] = ()
    """Those of which one computes wrongly; none if no single rank explains the results."""
    repeats: bool = False
    """The replays of this rank are wrong, too, and not the step alone."""
    confirmed: bool = False
    """Further replays would say no more."""

    @property
    def names_one(self) -> bool:
        """Whether it is known which rank it is."""
        return len(self.ranks) == 1


def judge(results: Sequence[Result]) -> Judgement | None:
    """Returns what explains the results; None if they agree."""
    by_owner: dict[int, list[Result]] = {}
    for one in results:
        by_owner.setdefault(one.owner, []).append(one)
    differing = [some for some in by_owner.values() if not _agree(some)]
    if not differing:
        return None
    involved = sorted({one.by for some in differing for one in some})
    ranks = tuple(rank for rank in involved if all(_agree_without(rank, some) for some in differing))
    own = [one for one in results if one.by in ranks]
    is_steady = all(
        _agree(one for one in own if (one.owner, one.by) == pair) for pair in {(r.owner, r.by) for r in own}
    )
    rounds = max(map(len, by_owner.values())) - 2
    return Judgement(
        ranks=ranks,
        repeats=len(ranks) == 1 and _repeats(ranks[0], differing),
        confirmed=not ranks or (rounds >= CONFIRMATIONS and (is_steady or len(results) >= _RESULTS)),
    )


def may_be_other_kernels(results: Sequence[Result]) -> bool:
    """Whether ranks that have chosen other kernels explain results that differ: a rank that computes a share again
    gets the same as before then, and another rank does not."""
    replays = [one for one in results if one.is_replay]
    pairs = {(one.owner, one.by) for one in replays}
    is_steady = all(_agree(one for one in replays if (one.owner, one.by) == pair) for pair in pairs)
    return is_steady and judge(replays) is not None


def judge_replicas(checksums: Mapping[int, int]) -> tuple[int, ...]:
    """Returns the ranks whose parameters are not those of the majority; all of them if none is one."""
    counts = Counter(checksums.values())
    if len(counts) <= 1:
        return ()
    [(usual, count)] = counts.most_common(1)
    has_majority = 2 * count > len(checksums)
    return tuple(rank for rank, checksum in checksums.items() if not has_majority or checksum != usual)


def describe(results: Sequence[Result], ranks: Sequence[int]) -> tuple[str, ...]:
    """Describes the results that differ, for people: one text for each rank whose share it is.

    Args:
        results: The results.
        ranks: The rank in the job of each replica.
    """
    texts: list[str] = []
    for owner in sorted({one.owner for one in results}):
        found: dict[int, Counter[int]] = {}
        for one in results:
            if one.owner == owner:
                found.setdefault(one.checksum, Counter())[ranks[one.by]] += 1
        if len(found) > 1:
            parts = (f"{checksum:016x} by {_count(by)}" for checksum, by in found.items())
            texts.append(f"those of rank {ranks[owner]} are {', '.join(parts)}")
    return tuple(texts)


def _count(by: Counter[int]) -> str:
    return " and ".join(f"rank {rank}" + (f" ({times} times)" if times > 1 else "") for rank, times in by.items())


def _agree(results: Iterable[Result]) -> bool:
    return len({one.checksum for one in results}) <= 1


def _agree_without(rank: int, results: Iterable[Result]) -> bool:
    """Whether other ranks have computed the same share as well, and all of them the same."""
    others = [one for one in results if one.by != rank]
    return bool(others) and _agree(others)


def _repeats(rank: int, differing: Iterable[Sequence[Result]]) -> bool:
    for results in differing:
        sound = {one.checksum for one in results if one.by != rank}
        if any(one.by == rank and one.is_replay and one.checksum not in sound for one in results):
            return True
    return False
