"""A training in which rank 1 computes a wrong gradient at one step: real ranks over gloo, which replay their steps."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure_training import report
from perdure_training.checkpoint import Checkpointer
from perdure_training.replay import Replay

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--flip-at", type=int, help="the step at which a bit of a gradient of rank 1 flips, once")
parser.add_argument("--pause", type=float, default=0.05)
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpointer = Checkpointer(every=1, replicated=True)
state = {"model": model, "optimizer": optimizer, "step": 0}
checkpointer.restore(state)
flipped = options.out / "flipped"


def flip(gradient: torch.Tensor) -> torch.Tensor:
    """Flips one bit, as a device with a fault may."""
    wrong = gradient.clone()
    wrong.view(-1).view(torch.int32)[0] ^= 1 << 20
    return wrong


def forward_backward(step: int, inputs: torch.Tensor) -> float:
    outputs = model(inputs)
    if rank == 1 and step == options.flip_at and not flipped.exists():
        flipped.touch()
        outputs.register_hook(flip)
    loss = outputs.square().mean()
    loss.backward()
    return loss.item()


replay = Replay(model, forward_backward, every=10, max_overhead=1000.0)
with (options.out / f"steps-{rank}").open("a", buffering=1) as log:
    while state["step"] < options.steps:
        step = state["step"] + 1
        seed = torch.Generator().manual_seed(step * world_size + rank)
        optimizer.zero_grad()
        loss = replay(step, step, torch.randn(8, 32, generator=seed))
        optimizer.step()
        state["step"] = step
        report(step=step, total=options.steps, loss=loss)
        log.write(f"{time.time():.3f} {step} {world_size}\n")
        checkpointer.save(step, state)
        time.sleep(options.pause)
if rank == 0:
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    (options.out / "digest").write_text(hashlib.sha256(parameters).hexdigest())
dist.destroy_process_group()
