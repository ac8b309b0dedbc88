"""A training that has everything that is measured: shards, checkpoints in memory and in storage, a loss, and a rank
that dies once. It ends when a file tells it to."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from perdure_training import report
from perdure_training.checkpoint import Checkpointer
from perdure_training.shards import ShardingClient

folder = Path(sys.argv[1])
rank, generation = (int(os.environ[name]) for name in ("RANK", "PERDURE_GENERATION"))
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
data = ShardingClient("train", size=1_000_000, shard_size=5, epochs=1)
state = {"model": model, "data": data}
checkpointer = Checkpointer(every=1)
step = checkpointer.restore(state) or 0
while True:
    step += 1
    shard = data.fetch()
    if generation == 1 and rank == 1 and step == 40:
        os.kill(os.getpid(), signal.SIGKILL)
    ends = torch.tensor([float((folder / "end").exists())])
    dist.all_reduce(ends)
    if shard:
        data.report(shard)
    data.step()
    checkpointer.save(step, state)
    report(step=step, total=100_000, loss=1 / step, mfu=0.4)
    if ends.item():
        break
    time.sleep(0.1)
dist.destroy_process_group()
