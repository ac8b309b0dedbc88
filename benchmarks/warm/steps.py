"""A rank that trains on request: for each line that it reads it times a block of steps, in seconds.

It runs both forked and started; the comparison makes the two step alternately.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, UNTIMED = int(sys.argv[1]), 50

torch.set_num_threads(1)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")
dist.init_process_group("gloo", rank=0, world_size=1)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
inputs, labels = torch.randn(64, 256), torch.randint(0, 10, (64,))


def train(steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


train(UNTIMED)
print("ready", flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    train(STEPS)
    print(time.perf_counter() - began, flush=True)
dist.destroy_process_group()
