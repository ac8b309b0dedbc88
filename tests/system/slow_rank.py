"""A training over gloo, or over NCCL on one GPU, that does not end, and of which one rank, or the rank on one node,
computes longer in each step than the others."""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

COMPUTES = 0.11
"""Seconds of a step: the noise of a busy machine is small beside it."""

parser = argparse.ArgumentParser()
parser.add_argument("--slow", type=int)
parser.add_argument("--slow-node", help="ROLE-RANK/INCARNATION")
parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
parser.add_argument("--program", choices=["ddp", "fsdp", "groups"], default="ddp")
options = parser.parse_args()
torch.set_num_threads(1)
device = torch.device("cuda" if options.backend == "nccl" else "cpu")
# NCCL refuses two ranks of one machine on one GPU.
os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
distributed.init_process_group(options.backend)
on_slow_node = options.slow_node == os.environ["PERDURE_NODE"].partition("/")[2]
factor = 1.5 if on_slow_node or distributed.get_rank() == options.slow else 1.0


class Layer(nn.Linear):
    """Computes for a share of a step."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        time.sleep(factor * COMPUTES / 4)
        return super().forward(input)


layers = nn.Sequential(*(Layer(16, 16) for _ in range(4))).to(device)
pair: distributed.ProcessGroup | None = None
model: nn.Module
match options.program:
    case "fsdp":
        for layer in layers:
            fully_shard(layer)
        model = layers
        fully_shard(model)
    case "groups":
        # Each pair of ranks shares its layers' results, as in tensor parallelism.
        pair, _ = distributed.new_subgroups(2)
        model = DistributedDataParallel(layers)
    case _:
        model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    loss = model(torch.randn(4, 16, device=device)).square().mean()
    if pair is not None:
        distributed.all_reduce(loss.detach(), group=pair)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # As a script does that prints its loss: otherwise the process runs many steps ahead of its device.
    loss.item()
