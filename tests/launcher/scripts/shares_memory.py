"""A rank that keeps its data in a segment of a fixed name, as streaming data sets do, and whose loader passes batches
on by files of /dev/shm, as scripts that have run out of open files choose."""

import os
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
from descent import Descent
from torch.utils.data import DataLoader, TensorDataset

torch.multiprocessing.set_sharing_strategy("file_system")
folder = Path(os.environ["TEST_STEPS_DIR"])
worker = folder / f"worker-{os.environ['PERDURE_GENERATION']}"


def begin(_: int) -> None:
    worker.write_text(str(os.getpid()))


if __name__ == "__main__":
    cache = SharedMemory(name=folder.name, create=True, size=4096)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Descent([parameter], lr=0.1)
    data = TensorDataset(torch.zeros(100_000))
    for _ in DataLoader(data, batch_size=1, num_workers=1, worker_init_fn=begin):
        parameter.grad = torch.ones(1)
        optimizer.step()
        time.sleep(0.01)
