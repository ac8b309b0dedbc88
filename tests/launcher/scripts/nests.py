"""Starts a torchrun of its own on rank 0 before it trains, for an evaluation, say."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from descent import Descent

if os.environ["RANK"] == "0":
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*torchrun, "nested.py"], check=True)
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = Descent([parameter], lr=0.1)
while True:
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.01)
