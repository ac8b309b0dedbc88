"""Keeps the samples of an optimizer's step constant while the world changes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatches:
    """A rank's part of the micro-batches of each step.

    The sum over all ranks is the same in every world, and so is the gradient's expectation. So the learning rate stays
    what it is: scale it only if you change `total`.

        micro = MicroBatches.of(total=32, rank=rank, world_size=world_size)
        for number, (inputs, targets) in enumerate(batches, start=1):
            (loss(model(inputs), targets) * micro.scale).backward()
            if number % micro.count == 0:
                optimizer.step()
    """

    count: int
    """Micro-batches of this rank in each step."""
    scale: float
    """The factor of each micro-batch's mean loss, where the ranks' gradients are averaged, as DDP and FSDP do."""

    @classmethod
    def of(cls, *, total: int, rank: int, world_size: int) -> MicroBatches:
        """Shares `total` micro-batches among the ranks.

        Raises:
            ValueError: if there are fewer micro-batches than ranks: a rank without any would wait in vain.
        """
        if total < world_size:
            raise ValueError(f"total: expected at least one micro-batch for each of {world_size} ranks, found {total}")
        return cls(count=total // world_size + (rank < total % world_size), scale=world_size / total)
