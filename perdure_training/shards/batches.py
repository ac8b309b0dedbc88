"""Shards for PyTorch's DataLoader: batches of a dataset with indices, with or without worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch.utils.data import DataLoader, Sampler

from perdure_training.shards.client import ShardingClient

_Batch = TypeVar("_Batch")


class ShardBatches(Sampler[list[int]]):
    """The batch sampler of a rank that reads leased shards.

        batches = ShardBatches(client, batch_size=32)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=4)
        for inputs, targets in batches.over(loader):
            ...
            client.step()

    A loader with workers asks for batches ahead of the loop. So what counts as consumed is what the loop was given.
    """

    def __init__(self, client: ShardingClient, *, batch_size: int) -> None:
        """Creates the sampler.

        Args:
            client: Leases the shards.
            batch_size: Samples of one batch. Batches go across shards; the last one may be smaller.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, found {batch_size}")
        self._client = client
        self._batch_size = batch_size
        self._lengths: deque[int] = deque()
        """Of the batches that the loader was given and the loop was not."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for shard in self._client:
            for index in shard:
                batch.append(index)
                if len(batch) == self._batch_size:
                    self._lengths.append(len(batch))
                    yield batch
                    batch = []
        if batch:
            self._lengths.append(len(batch))
            yield batch

    def over(self, loader: DataLoader[_Batch] | Iterable[_Batch]) -> Iterator[_Batch]:
        """Yields the loader's batches, in the order of this sampler, as DataLoaders do by default."""
        self._lengths.clear()
        for batch in loader:
            self._client.hand_over(self._lengths.popleft())
            yield batch
        self._client.hand_over(0)
