"""Which checkpoints are kept in the storage, and the deletion of the others."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from perdure.agent.checkpoint.records import read_metrics
from perdure.agent.checkpoint.storage import Storage
from perdure.contract.checkpoints import CheckpointRef
from perdure.spec.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


class Retention:
    """Deletes what a job's specification does not keep.

    Invariant: nothing is deleted that the run does not know to be superseded. It deletes what it has stored itself, up
    to the step that it has reached again; and of other runs the checkpoint from which it continued, and older ones.
    Where it could load none and started over, it deletes none of those that were there. One that is not loaded any
    more, as it is not sound or the job failed after it, takes no place of those that are kept. While the storage does
    not say of each folder whether it is a checkpoint, or lacks the newest one, nothing is deleted.
    """

    def __init__(
        self, storage: Storage, spec: Checkpoint, *, is_trusted: Callable[[CheckpointRef], bool] = lambda _: True
    ) -> None:
        """Creates the object.

        Args:
            storage: The job's storage.
            spec: How many checkpoints are kept, and which.
            is_trusted: Whether the job would load a checkpoint.
        """
        self._storage = storage
        self._spec = spec
        self._is_trusted = is_trusted
        self._metrics: dict[CheckpointRef, dict[str, float]] = {}
        """What was measured at the steps of checkpoints that were read once."""

    def apply(self, newest: CheckpointRef, inherited: Sequence[CheckpointRef], *, kept_before: int = 0) -> None:
        """Deletes after a commit what is superfluous. A failure is logged.

        Args:
            newest: The checkpoint that was just committed.
            inherited: The checkpoints of other runs from which this run has continued.
            kept_before: The generation in which this run started over; 0 for none.
        """
        try:
            self._delete(newest, inherited, kept_before)
        except Exception as error:
            logger.warning("old checkpoints are not deleted, which the next commit tries again: %s", error)

    def _delete(self, newest: CheckpointRef, inherited: Sequence[CheckpointRef], kept_before: int) -> None:
        storage, spec = self._storage, self._spec
        if not self._is_trusted(newest):
            return
        saved = [
            one
            for one in storage.saved(newest.place)
            if is_superseded(one, newest=newest, inherited=inherited, kept_before=kept_before)
        ]
        committed = frozenset(one for one in saved if storage.is_committed(one))
        if newest not in committed:
            raise LookupError(f"{storage.url} does not show {newest.folder}, which was just committed")
        committed = frozenset(filter(self._is_trusted, committed))
        best: list[CheckpointRef] = []
        if wanted := spec.keep_best:
            self._metrics = {one: self._metrics.get(one) or read_metrics(storage, one) for one in committed}
            values = {one: known[wanted.metric] for one, known in self._metrics.items() if wanted.metric in known}
            best = best_of(values, highest=wanted.mode == "max", count=wanted.count)
        for one in superfluous(
            saved, committed=committed, newest=newest, keep_last=spec.keep_last, keep_every=spec.keep_every, best=best
        ):
            storage.delete(one)


def is_superseded(
    one: CheckpointRef, *, newest: CheckpointRef, inherited: Sequence[CheckpointRef], kept_before: int = 0
) -> bool:
    """Whether a folder is the run's to delete: it stored it, and did not go back to an older one or start over since;
    or it continued from it or from one that came after it."""
    if one.run == newest.run:
        return one.generation >= kept_before and (one.generation == newest.generation or one.step <= newest.step)
    return any(one.place == base.place and one.step <= base.step for base in inherited)


def superfluous(
    saved: Sequence[CheckpointRef],
    *,
    committed: frozenset[CheckpointRef],
    newest: CheckpointRef,
    keep_last: int,
    keep_every: int | None,
    best: Collection[CheckpointRef] = (),
) -> list[CheckpointRef]:
    """Chooses the folders to delete after a commit.

    A folder that was never committed is deleted once a later step is durable: one checkpoint is stored at a time, so
    nothing is written to it any more that counts.

    Args:
        saved: All folders of one place that the run may delete.
        committed: Those that are checkpoints.
        newest: The one that was just committed.
        keep_last: The number of checkpoints to keep.
        keep_every: Checkpoints whose step is a multiple of it are kept beside these; None for none.
        best: Checkpoints that are kept beside these.
    """
    last = sorted(committed, reverse=True)[:keep_last]
    kept = {newest, *last, *best} | {one for one in committed if keep_every and one.step % keep_every == 0}
    return [one for one in saved if one not in kept and (one in committed or one < newest)]


def best_of(values: Mapping[CheckpointRef, float], *, highest: bool, count: int) -> list[CheckpointRef]:
    """Chooses the best checkpoints; of those that are as good, the latest.

    Args:
        values: The metric of each checkpoint that has one. Infinity and NaN do not count.
        highest: Whether higher values are better.
        count: The number of checkpoints.
    """
    known = [one for one, value in values.items() if math.isfinite(value)]
    return sorted(sorted(known, reverse=True), key=lambda one: values[one], reverse=highest)[:count]
