"""Trains with `Replay` in every second block of steps, and prints by how much these take longer."""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perdure_training.replay import Replay

_BLOCK_SECONDS = 5.0
_MAX_OVERHEAD = 0.01

dist.init_process_group("gloo")
layers = [torch.nn.Linear(512, 512) for _ in range(6)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)


def compute(batch: torch.Tensor) -> torch.Tensor:
    """Computes the gradients of a batch."""
    loss = model(batch).square().mean()
    loss.backward()
    return loss


replay = Replay(model, compute, every=10, max_overhead=_MAX_OVERHEAD)
step = 0


def train(steps: int, *, replays: bool) -> float:
    """Makes steps; returns the seconds of one."""
    global step
    began = time.perf_counter()
    for _ in range(steps):
        step += 1
        optimizer.zero_grad()
        batch = torch.randn(32, 512)
        replay(step, batch) if replays else compute(batch)
        optimizer.step()
    return (time.perf_counter() - began) / steps


train(40, replays=True)
count = torch.tensor([_BLOCK_SECONDS / train(40, replays=False)])
dist.all_reduce(count, dist.ReduceOp.MIN)
pairs: list[float] = []
plain: list[float] = []
for number in range(max(round(float(sys.argv[1]) / (2 * _BLOCK_SECONDS)), 3)):
    seconds: dict[bool, float] = {}
    for replays in (True, False) if number % 2 else (False, True):
        # Steps of the other blocks are not counted among those from one check to the next.
        replay._counting = None
        seconds[replays] = train(int(count), replays=replays)
    pairs.append(seconds[True] / seconds[False] - 1)
    plain.append(seconds[False])
if dist.get_rank() == 0:
    result = {
        "step_ms": round(1e3 * median(plain), 3),
        "replay_max_overhead_pct": 100 * _MAX_OVERHEAD,
        "replay_overhead_pct": round(100 * median(pairs), 2),
        "replay_overhead_range_pct": [round(100 * min(pairs), 2), round(100 * max(pairs), 2)],
    }
    print(json.dumps(result))
dist.destroy_process_group()
