"""Two ranks, each on a node of its own; the second lacks what the first has saved, and its memory is too small."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

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


def delete(step: int) -> None:
    """Makes the second node one that lacks this step."""
    for path in node.rglob("rank-*"):
        if rank == 1 and f'"step": {step},' in str(path.read_bytes()[:500]):
            path.unlink()


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


stores: list[Any] = []
dist.init_process_group("gloo")
rank = dist.get_rank()
node = Path(os.environ["PERDURE_MEMORY_DIR"]) / str(rank)
os.environ["PERDURE_MEMORY_DIR"] = str(node)
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"]
os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
state = {"weight": torch.zeros(1000)}
checkpointer, step = restored(state)
assert step is None
for number in (6, 7):
    state["weight"].fill_(number)
    checkpointer.save(number, state)
    checkpointer.flush()
dist.barrier()

found: list[int | None] = []
delete(7)
found.append(restored(state)[1])
assert state["weight"][0] == 7
delete(7)
if rank == 1:
    os.posix_fallocate = no_room
found.append(restored(state)[1])
assert state["weight"][0] == 6
delete(6)
found.append(restored(state)[1])
# One write: the ranks share the pipe.
os.write(1, f"rank {rank}: {', '.join(map(str, found))}\n".encode())
dist.barrier()
dist.destroy_process_group()
