"""Trains with steps that other ranks compute again, to find a device that computes wrongly without an error.

    perdure run --name checked --nodes 2 -- torchrun examples/08-checked-steps/train.py
    perdure check checked --replay

It runs the same without Perdure, where nothing is reported.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure_training import report
from perdure_training.checkpoint import Checkpointer
from perdure_training.replay import Replay


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small model, and has steps computed again.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def compute(batch: torch.Tensor) -> torch.Tensor:
        """Computes the gradients of a batch; the optimizer's step is not part of it."""
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    replay = Replay(model, compute, every=100, max_overhead=0.01)
    checkpointer = Checkpointer(every=1, replicated=True)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpointer.restore(state)
    while state["step"] < options.steps:
        step = state["step"] + 1
        seed = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        optimizer.zero_grad()
        loss = replay(step, torch.randn(8, 32, generator=seed))
        optimizer.step()
        state["step"] = step
        report(step=step, total=options.steps, loss=loss.item())
        checkpointer.save(step, state)
        time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
