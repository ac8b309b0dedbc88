"""Takes its time to save when it is told to end."""

import signal
import sys
import time

import torch


def save(*_: object) -> None:
    time.sleep(1.5)
    print("saved", flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
while True:
    parameter.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.01)
