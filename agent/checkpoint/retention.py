"""Which checkpoints are kept in the storage."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from agent.checkpoint.names import Saved


def superfluous(
    saved: Sequence[Saved],
    *,
    committed: frozenset[Saved],
    newest: Saved,
    keep_last: int,
    keep_every: int | None,
    best: Collection[Saved] = (),
) -> list[Saved]:
    """Chooses the folders to delete after a commit.

    A folder that was never committed is deleted once a later step is durable: one checkpoint is stored at a time, so
    nothing is written to it any more that counts.

    Args:
        saved: All folders of one place.
        committed: Those that are checkpoints.
        newest: The one that was just committed.
        keep_last: The number of checkpoints to keep.
        keep_every: Checkpoints whose step is a multiple of it are kept beside these; None for none.
        best: Checkpoints that are kept beside these.
    """
    last = sorted(committed, reverse=True)[:keep_last]
    kept = {newest, *last, *best} | {one for one in committed if keep_every and one.step % keep_every == 0}
    return [one for one in saved if one not in kept and (one in committed or one < newest)]


def best_of(values: Mapping[Saved, float], *, highest: bool, count: int) -> list[Saved]:
    """Chooses the best checkpoints; of those that are as good, the latest.

    Args:
        values: The metric of each checkpoint that has one. Infinity and NaN do not count.
        highest: Whether higher values are better.
        count: The number of checkpoints.
    """
    known = [one for one, value in values.items() if math.isfinite(value)]
    return sorted(sorted(known, reverse=True), key=lambda one: values[one], reverse=highest)[:count]
