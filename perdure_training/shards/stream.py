"""Shards for PyTorch's DataLoader, of data that is read in ranges: an IterableDataset, with or without workers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch.multiprocessing
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    default_collate,
    get_worker_info,
)

from perdure_training.shards.batches import check_current, in_step
from perdure_training.shards.client import ShardClient
from perdure_training.shards.partitions import StreamClient
from perdure_training.shards.shard import Shard, StreamShard
from perdure_training.shards.sharding_client import ShardingClient
from perdure_training.shards.spans import Span, merge

_SHARDS_PER_WORKER = 2
"""Shards that wait for a worker process."""
_LOOK = 0.1
"""Seconds after which the thread that feeds workers looks whether their loop was left."""

_Sample = TypeVar("_Sample")


@dataclass(frozen=True)
class Part:
    """A batch, and the positions of its samples."""

    batch: Any
    spans: list[Span]

    def pin_memory(self) -> Part:
        """Returns it in pinned memory, as a DataLoader requests."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return replace(self, batch=pin_memory(self.batch))  # pyrefly: ignore[unknown-argument-type]


class ShardStream(IterableDataset[Part], Generic[_Sample]):
    """Reads shards in the processes of a DataLoader.

        stream = ShardStream(client, read=rows, batch_size=32)
        loader = DataLoader(stream, batch_size=None, num_workers=4)
        for inputs, targets in stream.over(loader):
            ...
            client.step()

    The process of the training loop leases the shards and hands them to the workers. Each batch says which samples it
    holds, so that what counts as consumed is what the loop was given.
    """

    def __init__(
        self,
        client: ShardingClient | StreamClient,
        *,
        read: Callable[..., Iterable[_Sample]],
        batch_size: int,
        collate: Callable[[list[_Sample]], Any] = default_collate,
    ) -> None:
        """Creates the dataset, for one loader.

        Args:
            client: Leases the shards.
            read: Returns the samples of these indices, in their order; called in the workers. Of a stream, it is given
                a partition and offsets.
            batch_size: Samples of one batch. The last batch of each worker may be smaller.
            collate: Makes a batch of samples.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, found {batch_size}")
        self._client: ShardClient[Any] | None = client
        self._read = read
        self._batch_size = batch_size
        self._collate = collate
        self._queue: Any = None
        self._feeder: threading.Thread | None = None
        self._loops = 0
        """How often `over` has begun."""

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what works in the process of the training loop only."""
        return {**self.__dict__, "_client": None, "_feeder": None}

    def __iter__(self) -> Iterator[Part]:
        samples: list[_Sample] = []
        spans: list[Span] = []
        for first, shard in self._shards():
            for place, sample in enumerate(self._samples(shard)):
                samples.append(sample)
                spans.append((first + place, first + place + 1))
                if len(samples) == self._batch_size:
                    yield Part(self._collate(samples), merge(spans))
                    samples, spans = [], []
        if samples:
            yield Part(self._collate(samples), merge(spans))

    def in_step(self, loader: DataLoader[Part]) -> Iterator[tuple[Any, float]]:
        """Yields as many batches on all ranks, each with the factor of its mean loss: see `batches.in_step`."""
        return in_step(self._own_client, self.over(loader), self._any_batch)

    def over(self, loader: DataLoader[Part]) -> Iterator[Any]:
        """Yields the loader's batches.

        A loop may be left and another one begun, which is given what the first was not.

        Raises:
            ValueError: if workers would have to read what a second loop is given.
        """
        client = self._own_client
        self._loops += 1
        loop = self._loops
        if self._feeder is not None:
            if loader.persistent_workers:
                raise ValueError("persistent_workers: expected False, as a stream's workers read for one loop only")
            while self._feeder.is_alive():
                client.put_back()
                self._feeder.join(_LOOK)
        client.put_back()
        if loader.num_workers > 0:
            self._feed(client, loader)
        for part in cast("Iterable[Part]", loader):
            check_current(loop, self._loops)
            client.hand_over(part.spans)
            yield part.batch
        client.hand_over([])

    @property
    def _own_client(self) -> ShardClient[Any]:
        if self._client is None:
            raise RuntimeError("call it in the process of the training loop")
        return self._client

    def _feed(self, client: ShardClient[Any], loader: DataLoader[Part]) -> None:
        """Hands shards to the workers, from a thread, as they need them."""
        workers = loader.num_workers
        context = cast("Any", loader).multiprocessing_context or cast("Any", torch.multiprocessing).get_context()
        shards = context.Queue(_SHARDS_PER_WORKER * workers)
        self._queue = shards
        loop = self._loops

        def fetched() -> Iterator[Any]:
            while loop == self._loops and (shard := client.fetch()) is not None:
                yield client.span(shard)[0], shard
            yield from [None] * workers

        def feed() -> None:
            for one in fetched():
                while loop == self._loops:
                    try:
                        shards.put(one, timeout=_LOOK)
                        break
                    except queue.Full:
                        continue
            if loop != self._loops:
                # Nobody reads what is in it, and the process would wait for that when it ends.
                shards.cancel_join_thread()

        self._feeder = threading.Thread(target=feed, name="shards to workers", daemon=True)
        self._feeder.start()

    def _any_batch(self) -> Any:
        return self._collate(list(self._read(*self._own_client.read_arguments())))

    def _shards(self) -> Iterator[tuple[int, Shard | StreamShard]]:
        if get_worker_info() is not None:
            return iter(self._queue.get, None)
        client = self._own_client
        return ((client.span(shard)[0], shard) for shard in client)

    def _samples(self, shard: Shard | StreamShard) -> Iterator[_Sample]:
        where = (shard.partition,) if isinstance(shard, StreamShard) else ()
        samples = list(self._read(*where, list(shard)))
        if len(samples) != len(shard):
            raise ValueError(f"read() returned {len(samples)} samples for {len(shard)} indices; expected one for each")
        return iter(samples)
