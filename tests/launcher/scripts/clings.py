"""A rank that is hard to end: it ignores SIGTERM, and leaves daemons behind that do so too."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from descent import Descent

daemons = Path(os.environ["TEST_STEPS_DIR"]) / f"daemons-{os.environ['PERDURE_GENERATION']}"
signal.signal(signal.SIGTERM, lambda *_: print("told to end, and continues", flush=True))


def daemonize(stay: Callable[[], None]) -> None:
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            with daemons.open("a") as file:
                file.write(f"{os.getpid()}\n")
            stay()
        os._exit(0)
    os.waitpid(child, 0)


def as_python() -> None:
    while True:
        signal.pause()


def as_another_program() -> None:
    os.execlp("sh", "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")


daemonize(as_python)
daemonize(as_another_program)
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = Descent([parameter], lr=0.1)
while True:
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.01)
