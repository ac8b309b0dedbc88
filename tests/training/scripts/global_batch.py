"""Trains 20 steps of 7 samples in micro-batches of 2, and saves the parameters: global_batch.py ddp|fsdp2 OUT."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from perdure_training.elastic import GlobalBatch

_SAMPLES = 7
exchanges = 0


def counted(bucket: Any) -> Any:
    """Exchanges gradients as DDP does, and counts how often."""
    global exchanges
    exchanges += 1
    mean = bucket.buffer().div(dist.get_world_size())
    return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])


def main(kind: str, out: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    samples = torch.randn(20, _SAMPLES, 8, dtype=torch.float64)
    targets = samples.sum(dim=2, keepdim=True).sin()
    if kind == "ddp":
        model = DistributedDataParallel(model)
        # DDP reads annotations of a hook, and refuses those that are text.
        model.register_comm_hook(None, lambda _, bucket: counted(bucket))
    else:
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = GlobalBatch(_SAMPLES, micro_batch=2)
    for step in range(20):
        for micro in batch:
            with micro.sync(model):
                predicted = model(samples[step, micro.positions])
                (micro.weight * (predicted - targets[step, micro.positions]).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name.removeprefix("module."): full(value.detach()) for name, value in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(parameters, out)
        print(f"exchanges {exchanges}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


main(*sys.argv[1:])
