"""A training that knows nothing of Perdure: gloo, an all-reduce and an optimizer step, until a file ends it."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from descent import Descent

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = Descent(model.parameters(), lr=0.01)
stop = Path(os.environ["TEST_STEPS_DIR"]) / "stop"
step = 0
while True:
    model(torch.ones(2, 4)).sum().backward()
    over = torch.tensor([1.0 if stop.exists() else 0.0])
    dist.all_reduce(over)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    optimizer.step()
    step += 1
    if step == 1:
        print(f"rank {dist.get_rank()} of {dist.get_world_size()} steps", flush=True)
    if over.item() > 0:
        break
    time.sleep(0.01)
dist.destroy_process_group()
if "--linger" in sys.argv and os.environ["GROUP_RANK"] == sys.argv[sys.argv.index("--linger") + 1]:
    time.sleep(3600)
