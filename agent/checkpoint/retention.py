"""Which checkpoints are kept in the storage."""

from __future__ import annotations

from collections.abc import Sequence

from agent.checkpoint.names import Saved


def superfluous(
    saved: Sequence[Saved], *, committed: frozenset[Saved], newest: Saved, keep_last: int, keep_every: int | None
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
    """
    last = sorted(committed, reverse=True)[:keep_last]
    kept = {newest, *last} | {one for one in committed if keep_every and one.step % keep_every == 0}
    return [one for one in saved if one not in kept and (one in committed or one < newest)]
