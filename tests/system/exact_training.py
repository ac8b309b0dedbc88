"""A training whose result shows whether any sample was lost or consumed twice, and whether any parameter differs.

`tally` counts what its steps consumed of a leased dataset: sums of whole numbers, the same whichever rank has a sample.
`model` is trained in the order of an `ElasticSampler`, the same in each world of the same size.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure_training import report
from perdure_training.checkpoint import Checkpointer, Generators
from perdure_training.shards import ElasticSampler, ShardingClient

SAMPLES, SHARD, EPOCHS = 150, 3, 2
"""Of the leased dataset."""
BATCH, STEPS = 4, 50
"""Of each of two ranks that train the model."""
WIDTH = 16

folder, pause = Path(sys.argv[1]), float(sys.argv[2])
generation = int(os.environ.get("PERDURE_GENERATION", "0"))
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
inputs = torch.randn(2 * BATCH * STEPS, WIDTH, generator=torch.Generator().manual_seed(7))
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, WIDTH)), broadcast_buffers=False
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
client = ShardingClient("tallied", size=SAMPLES, shard_size=SHARD, epochs=EPOCHS, shuffle=True, seed=3)
sampler = ElasticSampler(len(inputs), seed=2)
tally = torch.zeros(EPOCHS, SAMPLES)
state: dict[str, Any] = {
    "model": model,
    "optimizer": optimizer,
    "data": client,
    "sampler": sampler,
    "tally": tally,
    "generators": Generators(),
    "worlds": [],
    "step": 0,
}
checkpointer = Checkpointer(every=1, replicated=True)
checkpointer.restore(state)
order = iter(sampler)
with (folder / "steps").open("a", buffering=1) as log:
    while True:
        batch, shard = list(islice(order, BATCH)), client.fetch()
        taken = torch.zeros(EPOCHS, SAMPLES)
        if shard is not None:
            taken[shard.epoch, list(shard)] = 1
        dist.all_reduce(taken)
        if not batch and not taken.any():
            break
        if batch:
            loss = model(inputs[batch]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sampler.advance(BATCH)
        tally += taken
        if shard is not None:
            client.report(shard)
        client.step()
        state["step"] += 1
        state["worlds"] = sorted({*state["worlds"], world_size})
        report(step=state["step"])
        log.write(f"{time.time():.3f} {state['step']} {rank} {world_size} {generation} {os.getpid()}\n")
        checkpointer.save(state["step"], state)
        time.sleep(pause)
if rank == 0:
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    result = {
        "digest": hashlib.sha256(parameters).hexdigest(),
        "tally": tally.flatten().int().tolist(),
        "worlds": state["worlds"],
        "step": state["step"],
    }
    draft = folder / "result.draft"
    draft.write_text(json.dumps(result))
    draft.replace(folder / "result.json")
dist.barrier()
dist.destroy_process_group()
