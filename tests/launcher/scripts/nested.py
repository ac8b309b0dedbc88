"""Runs in a torchrun that a rank has started, and sums up the ranks that it finds there."""

import os

import torch
import torch.distributed as dist
from descent import Descent

dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.ones(1)
dist.all_reduce(parameter.grad)
found = int(parameter.grad.item())
Descent([parameter], lr=0.1).step()
if dist.get_rank() == 0:
    print(f"nested: {found} of {dist.get_world_size()} ranks met at port {os.environ['MASTER_PORT']}", flush=True)
dist.destroy_process_group()
