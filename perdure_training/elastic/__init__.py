"""Keeps an optimizer's step the same while the world grows and shrinks; docs/data.md is the guide.

    from perdure_training.elastic import GlobalBatch

    batch = GlobalBatch(512, micro_batch=16)
    for step in range(start, total):
        for micro in batch:
            inputs, targets = collate(dataset[step * 512 + position] for position in micro.positions)
            with micro.sync(model):
                (micro.weight * loss(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()

It needs the standard library only.
"""

from __future__ import annotations

from perdure_training.elastic.global_batch import GlobalBatch, MicroBatch
from perdure_training.elastic.learning_rate import scaled_learning_rate

__all__ = ["GlobalBatch", "MicroBatch", "scaled_learning_rate"]
