"""Finds devices that compute wrongly without an error: a step's gradients are computed again on another rank.

    from perdure_training.replay import Replay

    def forward_backward(inputs, targets):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        return loss

    replay = Replay(model, forward_backward, every=100, max_overhead=0.01)
    for step in range(start, total):
        optimizer.zero_grad()
        loss = replay(step, *next(batches))
        optimizer.step()

docs/corruption.md is the guide. It needs torch.
"""

from __future__ import annotations

from perdure_training.replay.replay import Replay

__all__ = ["Replay"]
