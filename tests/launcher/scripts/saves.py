"""Takes time to save when it receives SIGTERM."""

import signal
import sys
import time

import torch
from descent import Descent


def save(*_: object) -> None:
    time.sleep(1.5)
    print("saved", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = Descent([parameter], lr=0.1)
while True:
    parameter.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.01)
