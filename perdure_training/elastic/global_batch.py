"""Splits the samples of an optimizer's step among ranks and micro-batches, so that the step is that of one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from math import ceil
from typing import Any


@dataclass(frozen=True)
class MicroBatch:
    """Samples that a rank computes at once."""

    positions: range
    """Their places in the global batch, which counts from 0."""
    weight: float
    """The factor of the mean loss of these samples, where gradients are averaged over ranks, as DDP and FSDP do: with
    it, the gradient is that of the mean loss of the global batch. 0 for a repeated sample."""
    last: bool
    """Whether the rank's gradient is complete with it, so that ranks exchange theirs."""

    def sync(self, *models: Any) -> AbstractContextManager[object]:
        """Has the ranks exchange gradients with the last micro-batch only; forward and backward belong inside.

        Args:
            models: Models whose gradients are exchanged: of DDP, FSDP or FSDP2. Others are left as they are.
        """
        stack = ExitStack()
        for model in models:
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(self.last)
            elif hasattr(model, "no_sync") and not self.last:
                stack.enter_context(model.no_sync())
        return stack


@dataclass(frozen=True)
class GlobalBatch:
    """The micro-batches of this rank in each optimizer's step, whose samples over all ranks are the same in any world.

    So neither the number of samples of a step nor the gradient's expectation depends on the number of ranks, and the
    learning rate stays what it is. All ranks have as many micro-batches, since FSDP gathers parameters in each of them;
    their sizes differ by one sample at most.
    """

    samples: int
    """Samples of a step, over all ranks."""
    micro_batch: int | None = None
    """The most samples that fit into a rank's memory; None where all do."""
    rank: int | None = None
    """By default as torchrun says. With tensor or pipeline parallelism, the rank among the data-parallel ones."""
    world_size: int | None = None
    """By default as torchrun says; or the number of data-parallel ranks."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples: expected at least 1, found {self.samples}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch: expected at least 1, found {self.micro_batch}")
        ranks = self._ranks
        if not 0 <= self._rank < ranks:
            raise ValueError(f"rank: expected one of {ranks} ranks from 0, found {self._rank}")
        if self.samples < ranks:
            raise ValueError(
                f"samples: expected at least one for each of {ranks} ranks, found {self.samples}; "
                "make the batch larger, or nodes.max smaller"
            )

    @property
    def _rank(self) -> int:
        return int(os.environ.get("RANK", "0")) if self.rank is None else self.rank

    @property
    def _ranks(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1")) if self.world_size is None else self.world_size

    @property
    def positions(self) -> range:
        """The places of all samples of this rank in the global batch."""
        return _part(range(self.samples), self._rank, of=self._ranks)

    def __len__(self) -> int:
        largest = ceil(self.samples / self._ranks)
        return ceil(largest / (self.micro_batch or largest))

    def __iter__(self) -> Iterator[MicroBatch]:
        own, count = self.positions, len(self)
        for number in range(count):
            last = number == count - 1
            # Micro-batches of one sample are one more than a rank has samples, where other ranks have one sample more.
            if part := _part(own, number, of=count):
                yield MicroBatch(part, weight=self._ranks * len(part) / self.samples, last=last)
            else:
                yield MicroBatch(own[-1:], weight=0.0, last=last)


def _part(whole: range, number: int, *, of: int) -> range:
    """One of several consecutive parts, the first of which are longer by one."""
    size, longer = divmod(len(whole), of)
    begin = number * size + min(number, longer)
    return whole[begin : begin + size + (number < longer)]
