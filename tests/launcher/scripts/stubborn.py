"""Ranks that ignore SIGTERM, like ranks that hang while they save."""

import os
import signal
import time

import torch
from descent import Descent

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], torch.__version__[0] and "is deaf", flush=True)
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = Descent([parameter], lr=0.1)
while True:
    parameter.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.01)
