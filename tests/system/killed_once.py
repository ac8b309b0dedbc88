"""A training over gloo, in which rank 1 kills itself in the first generation."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from perdure_training import report

dist.init_process_group("gloo")
for step in range(1, 6):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size() == 2
    report(step=step)
    if step == 3 and dist.get_rank() == 1 and os.environ["PERDURE_GENERATION"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
