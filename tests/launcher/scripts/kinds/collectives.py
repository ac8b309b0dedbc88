"""Plain collectives: no optimizer whose steps could be counted, so the script reports them."""

import time

import torch
import torch.distributed as dist

from perdure import training

dist.init_process_group("gloo")
total, step = torch.zeros(1000), 0
while True:
    part = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(part)
    dist.broadcast(total, src=0)
    total += part
    step += 1
    training.report(step=step, loss=float(total.sum()))
    time.sleep(0.01)
