"""Starts its ranks by `mp.spawn`, as scripts without torchrun do."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from descent import Descent

folder = Path(os.environ["TEST_STEPS_DIR"])


def train(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    print(f"{os.getpid()} is rank {rank} of {size}", flush=True)
    if rank == 1:
        (folder / f"second-{os.environ['PERDURE_GENERATION']}").write_text(str(os.getpid()))
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = Descent([parameter], lr=0.1)
    dist.barrier()
    while True:
        parameter.grad = torch.ones(1)
        dist.all_reduce(parameter.grad)
        optimizer.step()
        if rank == 0 and (folder / "fail").exists():
            raise ValueError("of the script")
        time.sleep(0.01)


if __name__ == "__main__":
    mp.spawn(train, (2,), nprocs=2)
