"""Saves after SIGTERM with the help of its children: a process at a pipe, another program, and DataLoader workers,
except with `--without-torch`."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MORE_BATCHES = 20
WITHOUT_TORCH = "--without-torch" in sys.argv


def steps() -> Iterator[None]:
    """Makes a step before each of its values."""
    if WITHOUT_TORCH:
        from perdure_training import report

        for number in itertools.count(1):
            report(step=number)
            time.sleep(0.01)
            yield
    import torch
    from descent import Descent
    from torch.utils.data import DataLoader

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Descent([parameter], lr=0.1)
    numbers: Any = range(10**6)
    for _ in DataLoader(numbers, batch_size=4, num_workers=2, prefetch_factor=2):
        parameter.grad = torch.ones(1)
        optimizer.step()
        yield


def double(requests: Connection) -> None:
    # A process that was forked has the handlers of its parent.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        requests.send(2 * requests.recv())


terminated: list[int] = []
ours, theirs = multiprocessing.get_context("fork").Pipe()
helper = multiprocessing.get_context("fork").Process(target=double, args=(theirs,))
helper.start()
theirs.close()
program = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert program.stdin
assert program.stdout
signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
batches = steps()
while not terminated:
    next(batches)
for _ in range(MORE_BATCHES):
    next(batches)
# Longer than leftovers of it have, and than torchrun takes to end.
time.sleep(2 if WITHOUT_TORCH else 8)
ours.send(21)
program.stdin.write(b"still there\n")
program.stdin.flush()
saved = f"{ours.recv()} {program.stdout.readline().decode().strip()} after {len(terminated)} signal"
(Path(os.environ["TEST_STEPS_DIR"]) / f"saved-{os.environ['RANK']}").write_text(saved)
sys.stdout.flush()
# Leaves all children behind.
os._exit(0)
