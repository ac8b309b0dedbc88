"""A training with a fixed global batch, the same in worlds of any size: elastic_loss.py OUT [STEPS]. Without STEPS it
ends once OUT/finish exists. The first rank writes OUT/result.json at the end."""

from __future__ import annotations

import json
import os
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
from perdure_training.elastic import GlobalBatch

SAMPLES, WIDTH = 13, 8
folder, *limit = sys.argv[1:]
out = Path(folder)
generation = int(os.environ.get("PERDURE_GENERATION", "0"))
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH)).double())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0, "loss": 0.0, "worlds": []}
checkpointer = Checkpointer(every=1, replicated=True)
checkpointer.restore(state)
state["worlds"] = [*state["worlds"], world_size]
batch = GlobalBatch(SAMPLES, micro_batch=3)
with (out / "steps").open("a", buffering=1) as log:
    while True:
        source = torch.Generator().manual_seed(state["step"])
        samples = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=source)
        total = torch.zeros((), dtype=torch.float64)
        for micro in batch:
            part = samples[micro.positions]
            with micro.sync(model):
                loss = micro.weight * (model(part) - part.sin()).square().mean()
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        done = state["step"] >= int(limit[0]) if limit else (out / "finish").exists()
        # Ranks agree on the loss, and on the last step.
        agreed = torch.stack([total / world_size, torch.tensor(float(done and rank == 0), dtype=torch.float64)])
        dist.all_reduce(agreed)
        state["loss"] = agreed[0].item()
        report(step=state["step"], loss=state["loss"])
        log.write(f"{time.time():.3f} {state['step']} {rank} {world_size} {generation} {os.getpid()}\n")
        checkpointer.save(state["step"], state)
        if agreed[1].item():
            break
        if not limit:
            time.sleep(0.05)
if rank == 0:
    parameters = [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]
    result = {name: state[name] for name in ("step", "loss", "worlds")} | {"parameters": parameters}
    (out / "result.json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
