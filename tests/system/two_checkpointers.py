"""A training with two states that are saved apart from each other, as a model and what it replays: real ranks over
gloo."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from perdure_training.checkpoint import Checkpointer

torch.set_num_threads(1)
dist.init_process_group("gloo")
states = {"model": {"weights": torch.zeros(64), "step": 0}, "buffer": {"samples": torch.zeros(64), "step": 0}}
checkpointers = {name: Checkpointer(every=1, replicated=True, name=name) for name in states}
for name, state in states.items():
    checkpointers[name].restore(state)
while True:
    for name, state in states.items():
        state["step"] += 1
        dist.barrier()
        checkpointers[name].save(state["step"], state)
    time.sleep(0.05)
