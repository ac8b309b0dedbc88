"""Shards for PyTorch's DataLoader: batches of a dataset with indices, with or without worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, Sampler

from perdure_training.shards.client import ShardClient
from perdure_training.shards.sharding_client import ShardingClient

_Batch = TypeVar("_Batch")

_NOT_HANDED_OVER = (
    "loop over `batches.over(loader)` or `batches.in_step(loader)` instead of over the loader or the batches"
)


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
        if not isinstance(client, ShardingClient):
            raise TypeError("client: expected that of a dataset with indices; ShardStream reads streams")
        self._client = client
        self._batch_size = batch_size
        self._lengths: deque[int] = deque()
        """The lengths of the batches that the loader was given and the loop was not."""
        self._hands_over = False
        """`over` gives the batches to the loop."""
        self._loops = 0
        """How often `over` has begun."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for shard in self._client:
            for index in shard:
                batch.append(index)
                if len(batch) == self._batch_size:
                    yield self._given(batch)
                    batch = []
        if batch:
            yield self._given(batch)

    def _given(self, batch: list[int]) -> list[int]:
        self._lengths.append(len(batch))
        if not self._hands_over:
            self._client.expect_reports(_NOT_HANDED_OVER)
        return batch

    def in_step(self, loader: DataLoader[_Batch]) -> Iterator[tuple[_Batch, float]]:
        """Yields as many batches on all ranks, each with the factor of its mean loss: see `in_step`."""
        return in_step(self._client, self.over(loader), lambda: _any_batch(loader))

    def over(self, loader: DataLoader[_Batch] | Iterable[_Batch]) -> Iterator[_Batch]:
        """Yields the loader's batches, in the order of this sampler, as DataLoaders do by default.

        A loop may be left and another one begun, which is given what the first was not.
        """
        self._loops += 1
        loop = self._loops
        self._lengths.clear()
        self._client.put_back()
        self._hands_over = True
        try:
            for batch in loader:
                check_current(loop, self._loops)
                self._client.hand_over(self._lengths.popleft())
                yield batch
        finally:
            if loop == self._loops:
                self._hands_over = False
        self._client.hand_over(0)


def check_current(loop: int, newest: int) -> None:
    """Refuses to continue a loop when another one has begun, which is given its samples.

    Raises:
        RuntimeError: if one has.
    """
    if loop != newest:
        raise RuntimeError("another loop over these batches has begun, and is given what this one was not; use one")


def in_step(
    client: ShardClient[Any], batches: Iterator[_Batch], any_batch: Callable[[], _Batch]
) -> Iterator[tuple[_Batch, float]]:
    """Yields as many batches on all ranks, each with the factor of its mean loss, for ranks that step together.

    Fast ranks get more shards, so that some have no batch left while others do. Such a rank is given its last batch
    once more, with the factor 0. The others' factor makes up for it where gradients are averaged over all ranks, as DDP
    and FSDP do. It is a collective with each batch.

    Args:
        client: Leases the shards.
        batches: Of this rank.
        any_batch: Returns a batch for a rank that has never had one.
    """
    last: list[_Batch] = []
    while True:
        batch = next(batches, None)
        active, ranks = client.active_ranks(batch is not None)
        if not active:
            return
        if batch is not None:
            last = [batch]
        elif not last:
            last = [any_batch()]
        yield last[0], ranks / active if batch is not None else 0.0


def _any_batch(loader: DataLoader[_Batch]) -> _Batch:
    collate = cast("Callable[[list[Any]], _Batch]", cast("Any", loader).collate_fn)
    return collate([loader.dataset[0]])
