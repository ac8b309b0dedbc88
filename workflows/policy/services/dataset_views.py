"""What others learn of a dataset: its views, and its reports to the job."""

from __future__ import annotations

from datetime import datetime

from perdure.contract.datasets import (
    PARTITION_SIZE,
    DatasetView,
    PartitionView,
    UnprocessedSamples,
    UnreadableDataset,
)
from perdure.workflows.policy.services.datasets import MOST_NAMED, DatasetState, has_others
from perdure.workflows.policy.services.failed_shards import MOST_IN_VAIN, UNREADABLE_AFTER
from perdure.workflows.policy.services.spans import intersection, size


def samples_done(state: DatasetState) -> int:
    """The samples that ranks have processed, in all epochs."""
    aside = size(intersection(state.aside, ((0, state.next),) if state.next else ()))
    return state.next - sum(state.parameters.starts) - size(state.leased) - size(state.free) - aside


def unprocessed(state: DatasetState, name: str) -> UnprocessedSamples:
    """The report to the job about the shards that were set aside."""
    return UnprocessedSamples(dataset=name, samples=size(state.aside), shards=state.details[:MOST_NAMED])


def unreadable(state: DatasetState, name: str, *, ranks: int, now: datetime) -> UnreadableDataset | None:
    """The report to the job that nothing can be read; None where something can be, or may be while a shard takes long.

    Args:
        state: The dataset.
        name: Its name.
        ranks: The number of ranks that read it.
        now: The time.
    """
    if not state.failures or (state.done_at is not None and now - state.done_at < UNREADABLE_AFTER):
        return None
    in_vain = [one for one in state.failures if one.is_in_vain(state.done_at, now)]
    begun = min((one.since for one in in_vain if one.since is not None), default=now)
    since = begun if state.done_at is None else max(begun, state.done_at)
    if now - since < UNREADABLE_AFTER or (len(in_vain) < max(MOST_IN_VAIN, ranks) and has_others(state)):
        return None
    return UnreadableDataset(dataset=name, since=since, error=state.error)


def view(state: DatasetState) -> DatasetView:
    """What users see of a dataset."""
    return DatasetView(
        done=samples_done(state),
        leased=size(state.leased),
        total=_total(state),
        partitions=_partitions(state),
        set_aside_samples=size(state.aside),
        set_aside=state.details,
        state_bytes=len(state.model_dump_json()),
    )


def _total(state: DatasetState) -> int | None:
    if not state.parameters.partitions:
        return state.parameters.end
    if not state.complete or max(state.ends) == PARTITION_SIZE:
        return None
    return sum(max(end - start, 0) for start, end in zip(state.parameters.starts, state.ends, strict=True))


def _partitions(state: DatasetState) -> tuple[PartitionView, ...]:
    holes = state.position.holes
    firsts = {first // PARTITION_SIZE: first % PARTITION_SIZE for first, _ in reversed(holes)}
    return tuple(
        PartitionView(name=name, next=firsts.get(number, end), end=None if end == PARTITION_SIZE else end)
        for number, (name, end) in enumerate(zip(state.parameters.partitions, state.ends, strict=False))
    )
