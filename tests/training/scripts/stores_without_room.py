"""Two ranks with memory folders of their own, of which one is too small: they store steps all the same, and restore."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from perdure_training.checkpoint import Checkpointer


def restored(state: dict[str, Any]) -> tuple[Checkpointer, int | None]:
    """Restores as the ranks of a new generation do, which has a store of its own."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [host.port if host else None]
    dist.broadcast_object_list(port)
    stores.append(host)
    os.environ["PERDURE_STORE"] = f"127.0.0.1:{port[0]}"
    os.environ["PERDURE_GENERATION"] = str(len(stores))
    checkpointer = Checkpointer(every=1, replicated=True)
    return checkpointer, checkpointer.restore(state)


stores: list[Any] = []
dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["PERDURE_MEMORY_DIR"] = sys.argv[1 + rank]
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"] = sys.argv[3]
os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
state = {"weight": torch.zeros(10_000)}
checkpointer, step = restored(state)
assert step is None
# The first rank has snapshots of these, until there is no room for more that are not complete.
for number in range(1, 7):
    state["weight"].fill_(number)
    checkpointer.save(number, state)
    checkpointer.flush()
    dist.barrier()
state["weight"].fill_(9)
assert checkpointer.save(9, state, durable=True)
assert checkpointer.wait_until_durable(60)
state["weight"].fill_(10)
assert not checkpointer.save(10, state)
dist.barrier()

again = restored(state)[1]
# One write: the ranks share the pipe.
os.write(1, f"rank {rank}: {again}, {state['weight'][0]:.0f}\n".encode())
dist.barrier()
dist.destroy_process_group()
