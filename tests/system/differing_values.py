"""Trains a model whose ranks differ in the statistics of a BatchNorm, or in experts that are plain tensors."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure_training import report
from perdure_training.checkpoint import Checkpointer

kind, out = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
out.mkdir(parents=True, exist_ok=True)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))
optimizer = torch.optim.AdamW(model.parameters())
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
if kind == "experts":
    state["expert"] = torch.full((8,), float(rank))
checkpointer = Checkpointer(every=1)
checkpointer.restore(state)
with (out / f"steps-{rank}").open("a", buffering=1) as log:
    while True:
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if kind == "experts":
            state["expert"] += 1
            assert state["expert"][0] == state["step"] + rank
        report(step=state["step"])
        log.write(f"{time.time():.3f} {state['step']} {world_size}\n")
        checkpointer.save(state["step"], state)
        time.sleep(0.3)
