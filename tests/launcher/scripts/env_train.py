"""A training for launches without torchrun: it reads its rank from the environment alone."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from descent import Descent

dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = Descent([parameter], lr=0.1)
stop = Path(os.environ["TEST_STEPS_DIR"]) / "stop"
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
print(*(f"{name}={os.environ[name]}" for name in names), flush=True)
while True:
    parameter.grad = torch.ones(1)
    over = torch.tensor([1.0 if stop.exists() else 0.0])
    dist.all_reduce(over)
    optimizer.step()
    if over.item() > 0:
        break
    time.sleep(0.01)
dist.destroy_process_group()
