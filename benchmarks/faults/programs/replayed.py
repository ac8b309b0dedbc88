"""Trains with `DistributedDataParallel`, and has ranks compare their parameters and compute steps again."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perdure_training import report
from perdure_training.checkpoint import Checkpointer
from perdure_training.replay import Replay

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def compute(batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss


replay = Replay(model, compute, every=10, max_overhead=0.5)
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
    report(step=step, loss=loss.item())
    checkpointer.save(step, state)
    time.sleep(0.05)
dist.destroy_process_group()
