"""What ranks are given: samples of a dataset, or of one partition of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from perdure_training.shards.permutation import Permutation

_NAMED = 8
"""Samples of one shard that are named."""


@dataclass(frozen=True)
class Shard:
    """Samples that this rank processes."""

    epoch: int
    first: int
    """The first sample's place in the order of the epoch."""
    end: int
    permutation: Permutation | None
    """The order of the epoch; None where it is that of the dataset."""

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[int]:
        """Yields the samples' indices in the dataset."""
        places = range(self.first, self.end)
        return iter(places) if self.permutation is None else map(self.permutation.__getitem__, places)


@dataclass(frozen=True)
class StreamShard:
    """Samples of a stream that this rank processes."""

    partition: str
    first: int
    """The first sample's offset in its partition."""
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def __iter__(self) -> Iterator[int]:
        """Yields the samples' offsets."""
        return iter(range(self.first, self.end))


def describe(shard: Shard | StreamShard) -> str:
    """Names the samples of a shard, for people."""
    samples = ", ".join(map(str, islice(shard, _NAMED)))
    more = f" and {len(shard) - _NAMED} more" if len(shard) > _NAMED else ""
    where = f"epoch {shard.epoch}" if isinstance(shard, Shard) else f"partition {shard.partition}"
    return f"samples {samples}{more} of {where}"
