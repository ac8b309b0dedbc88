"""A training that names its own master, like scripts for machines without a launcher."""

import os
import sys
import time

os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29511"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from descent import Descent  # noqa: E402

match sys.argv[1]:
    case "env":
        dist.init_process_group("gloo")
    case "tcp":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method="tcp://localhost:29511", rank=rank, world_size=size)
    case "alone":
        dist.init_process_group("gloo", rank=0, world_size=1)
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = Descent([parameter], lr=0.1)
while True:
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.01)
