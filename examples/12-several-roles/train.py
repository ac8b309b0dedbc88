"""A training that adds a number to a server in each step, and goes on where one recovers."""

import os
import time
from datetime import timedelta

import torch.distributed as dist

from perdure_training import report, roles
from perdure_training.checkpoint import Checkpointer

STEPS = int(os.environ.get("STEPS", "300"))

dist.init_process_group("gloo")
checkpointer, state = Checkpointer(every=1, replicated=True), {"step": 0}
checkpointer.restore(state)
while state["step"] < STEPS:
    try:
        roles.call("ps", "add", 1.0, rank=dist.get_rank(), wait=timedelta(minutes=1))
    except (roles.RoleUnavailable, roles.CallTimeout) as problem:
        # The server has died in this call, so it may or may not have counted the step.
        print("going on:", problem, flush=True)
    time.sleep(0.1)  # as if there were something to compute
    dist.barrier()
    state["step"] += 1
    checkpointer.save(state["step"], state)
    report(step=state["step"], total=STEPS)
    if dist.get_rank() == 0 and state["step"] % 20 == 0:
        print(f"step {state['step']}", flush=True)
dist.destroy_process_group()
