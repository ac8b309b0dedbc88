"""A training whose gradients are spoiled on rank 1, or whose reports are: real ranks over gloo, with snapshots."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure_training import report
from perdure_training.checkpoint import Checkpointer
from perdure_training.shards import ShardingClient

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--spoil-at", type=int, help="the step at which a gradient of rank 1 is not a number")
parser.add_argument("--always", action="store_true", help="each time that it is made, and not only the first time")
parser.add_argument("--forget", action="store_true", help="lose what is in memory when it is made again")
parser.add_argument("--misreport-at", type=int, help="the step whose loss rank 1 reports wrongly")
parser.add_argument("--pause", type=float, default=0.05)
options = parser.parse_args()

spoiled = options.out / "spoiled"
if options.forget and spoiled.exists():
    shutil.rmtree(os.environ["PERDURE_MEMORY_DIR"], ignore_errors=True)
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
client = ShardingClient("numbers", size=4 * options.steps, shard_size=2)
checkpointer = Checkpointer(every=1, replicated=True)
state = {"model": model, "optimizer": optimizer, "data": client, "step": 0}
checkpointer.restore(state)
with (options.out / f"steps-{rank}").open("a", buffering=1) as log:
    while state["step"] < options.steps:
        shard = client.fetch()
        seed = torch.Generator().manual_seed(state["step"] * world_size + rank)
        loss = model(torch.randn(8, 32, generator=seed)).square().mean()
        step, factor = state["step"] + 1, 1.0
        if rank == 1 and step == options.spoil_at and (options.always or not spoiled.exists()):
            spoiled.touch()
            factor = math.nan
        optimizer.zero_grad()
        (loss * factor).backward()
        optimizer.step()
        if shard is not None:
            client.report(shard)
        client.step()
        state["step"] = step
        shown = math.nan if step == options.misreport_at and rank == 1 else loss.item()
        report(step=step, total=options.steps, loss=shown)
        log.write(f"{time.time():.3f} {step} {world_size}\n")
        checkpointer.save(step, state)
        time.sleep(options.pause)
if rank == 0:
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    (options.out / "digest").write_text(hashlib.sha256(parameters).hexdigest())
dist.destroy_process_group()
