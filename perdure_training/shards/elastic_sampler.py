"""DistributedSampler's order in a world that changes: no leases, and each rank's samples are known beforehand."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import Sampler


class ElasticSampler(Sampler[int]):
    """Gives the ranks the samples of an epoch in turn, and continues where a world of another size stopped.

    The order is that of `torch.utils.data.DistributedSampler` with the same seed. With the same world size it gives
    each rank the same samples, so that training is repeatable bit by bit; after a change of the world, the ranks share
    what is left of the epoch.

    As there, the last samples are repeated where they do not suffice for all ranks.
    """

    def __init__(
        self, size: int, *, shuffle: bool = True, seed: int = 0, rank: int | None = None, world_size: int | None = None
    ) -> None:
        """Creates the sampler.

        Args:
            size: Samples of the dataset.
            shuffle: Permute the samples of each epoch, each epoch differently.
            seed: Of the permutations.
            rank: By default as torchrun says.
            world_size: By default as torchrun says.
        """
        self._size = size
        self._shuffle = shuffle
        self._seed = seed
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self._epoch = 0
        self._consumed = 0
        """Samples of the epoch that all ranks together have consumed."""

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration reads. The epoch that a position was loaded for is continued."""
        if epoch != self._epoch:
            self._epoch, self._consumed = epoch, 0

    def __len__(self) -> int:
        """The samples that are left for each rank."""
        return math.ceil(max(self._size - self._consumed, 0) / self._world_size)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._size))
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed(self._seed + self._epoch)
            order = cast("list[int]", cast("Any", torch.randperm(self._size, generator=generator)).tolist())
        rest = order[self._consumed :]
        missing = len(self) * self._world_size - len(rest)
        if missing and order:
            rest += (order * (missing // len(order) + 1))[:missing]
        return iter(rest[self._rank :: self._world_size])

    def advance(self, samples: int) -> None:
        """Records that each rank has consumed so many samples: call it after each step, on every rank."""
        self._consumed = min(self._consumed + samples * self._world_size, self._size)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, to save with a checkpoint; the same on all ranks."""
        return {"epoch": self._epoch, "consumed": self._consumed, "size": self._size, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position, in a world of any size.

        Raises:
            ValueError: if the position is of a dataset with another size or seed.
        """
        for field, own in (("size", self._size), ("seed", self._seed)):
            if state[field] != own:
                raise ValueError(f"{field}: the position is of a dataset with {state[field]}, not {own}")
        self._epoch, self._consumed = int(state["epoch"]), int(state["consumed"])
