"""The micro-batches of a rank for PyTorch's DataLoader, in one order of samples for worlds of any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import Sampler

from perdure_training.elastic.global_batch import GlobalBatch, MicroBatch


class GlobalBatchSampler(Sampler[list[int]]):
    """The batch sampler of a rank that accumulates the micro-batches of a `GlobalBatch`.

    Each epoch has a permutation of its own. Samples that are left after the last whole global batch of an epoch are
    left out.
    """

    def __init__(self, size: int, batch: GlobalBatch, *, shuffle: bool = True, seed: int = 0) -> None:
        """Creates the sampler.

        Args:
            size: Samples of the dataset.
            batch: The samples of a step.
            shuffle: Permute the samples of each epoch, each epoch differently.
            seed: Of the permutations.

        Raises:
            ValueError: if the dataset has fewer samples than one step.
        """
        if size < batch.samples:
            raise ValueError(f"samples: the dataset has {size}, fewer than the {batch.samples} of one step")
        self._size = size
        self._micro_batches = tuple(batch)
        self._samples = batch.samples
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._done = 0
        """Steps that the next iteration leaves out."""
        self.sampler = self
        """Lightning looks for `set_epoch` at the sampler of a batch sampler."""

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches of each step."""
        return self._micro_batches

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._epoch

    @property
    def steps(self) -> int:
        """The steps of an epoch."""
        return self._size // self._samples

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration reads."""
        self._epoch = epoch

    def continue_after(self, steps: int) -> None:
        """Has the next iteration begin after so many steps of its epoch."""
        self._done = steps

    def __len__(self) -> int:
        """The micro-batches of an epoch."""
        return self.steps * len(self._micro_batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self._size))
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed(self._seed + self._epoch)
            order = cast("list[int]", cast("Any", torch.randperm(self._size, generator=generator)).tolist())
        done, self._done = self._done, 0
        for step in range(done, self.steps):
            first = step * self._samples
            for micro in self._micro_batches:
                yield [order[first + position] for position in micro.positions]
