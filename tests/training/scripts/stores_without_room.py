"""Two ranks with memory folders, one too small: they store a step, and the ranks of generation 2 restore it."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from perdure_training.checkpoint import Checkpointer

*folders, run, generation = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
port: list[Any] = [host.port if host else None]
dist.broadcast_object_list(port)
os.environ["PERDURE_STORE"] = f"127.0.0.1:{port[0]}"
os.environ["PERDURE_GENERATION"] = generation
os.environ["PERDURE_MEMORY_DIR"] = folders[rank]
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"] = run
os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"

state = {"weight": torch.zeros(10_000)}
checkpointer = Checkpointer(every=1, replicated=True)
step = checkpointer.restore(state)
# One write: the ranks share the pipe.
os.write(1, f"rank {rank}: {step}, {state['weight'][0]:.0f}\n".encode())
if step is None:
    # The first rank has snapshots of these, until there is no room for more that are not complete.
    for number in range(1, 7):
        state["weight"].fill_(number)
        checkpointer.save(number, state)
        checkpointer.flush()
        dist.barrier()
    state["weight"].fill_(9)
    assert checkpointer.save(9, state, durable=True)
    assert checkpointer.wait_until_durable(60)
    assert not checkpointer.save(10, state)
dist.barrier()
dist.destroy_process_group()
