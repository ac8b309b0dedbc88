"""A training over gloo, or over NCCL on one GPU, that does not end, and of which one rank, or the rank on one node,
computes longer in each step than the others."""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

COMPUTES = 0.11
"""Seconds of a step: the noise of a busy machine is small beside it."""

parser = argparse.ArgumentParser()
parser.add_argument("--slow", type=int)
parser.add_argument("--slow-node", help="ROLE-RANK/INCARNATION")
parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
options = parser.parse_args()
torch.set_num_threads(1)
device = torch.device("cuda" if options.backend == "nccl" else "cpu")
# NCCL refuses two ranks of one machine on one GPU.
os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
distributed.init_process_group(options.backend)
model = DistributedDataParallel(nn.Linear(16, 16).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
on_slow_node = options.slow_node == os.environ["PERDURE_NODE"].partition("/")[2]
factor = 1.5 if on_slow_node or distributed.get_rank() == options.slow else 1.0
while True:
    loss = model(torch.randn(4, 16, device=device)).square().mean()
    time.sleep(factor * COMPUTES)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # As a script does that prints its loss: otherwise the process runs many steps ahead of its device.
    loss.item()
