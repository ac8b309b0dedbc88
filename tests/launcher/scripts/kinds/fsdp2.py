"""FSDP2: sharded parameters, mixed with a checkpoint of DCP."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
folder = Path(os.environ["TEST_STEPS_DIR"])
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
while True:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    step += 1
    if step == 5:
        dcp.state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=folder / "checkpoint")
