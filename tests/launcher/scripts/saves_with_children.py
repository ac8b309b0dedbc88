"""Saves after SIGTERM with the help of its children: DataLoader workers, a process at a pipe, and another program."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from descent import Descent
from torch.utils.data import DataLoader, Dataset

MORE_BATCHES = 20


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> int:
        return index


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
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = Descent([parameter], lr=0.1)
batches = iter(DataLoader(Numbers(), batch_size=4, num_workers=2, prefetch_factor=2))
while not terminated:
    next(batches)
    parameter.grad = torch.ones(1)
    optimizer.step()
for _ in range(MORE_BATCHES):
    next(batches)
# Longer than torchrun takes to end, and leftovers after it.
time.sleep(8)
ours.send(21)
program.stdin.write(b"still there\n")
program.stdin.flush()
saved = f"{ours.recv()} {program.stdout.readline().decode().strip()} after {len(terminated)} signal"
(Path(os.environ["TEST_STEPS_DIR"]) / f"saved-{os.environ['RANK']}").write_text(saved)
sys.stdout.flush()
# Leaves all children behind.
os._exit(0)
