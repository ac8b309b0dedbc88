"""Two ranks, each on a node of its own, with a state that only its node has; nodes are lost and replaced, the last time
after the newest copy on the other one was damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from perdure_launcher.system.ports import PortPool
from perdure_training.checkpoint import Checkpointer
from perdure_training.snapshots.arena import PAGE, Arena
from perdure_training.snapshots.copies import CopyReceiver

DAMAGED = 3
"""The turn in which the lost node's newest copy is damaged."""


def begin_node(name: str) -> None:
    """Gives this rank the memory of a new node, and its receiver."""
    node = memory / name
    node.mkdir(parents=True)
    pool = PortPool("127.0.0.1", listening=True, size=1)
    receivers.append(CopyReceiver(node, pool.take(pool.numbers[0]), host="127.0.0.1"))
    os.environ["PERDURE_MEMORY_DIR"] = str(node)
    os.environ["PERDURE_COPIES"] = receivers[-1].address.dump()


def restored(state: dict[str, Any]) -> tuple[Checkpointer, int | None]:
    """Restores as the ranks of a new generation do, which has a store of its own."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [host.port if host else None]
    dist.broadcast_object_list(port)
    stores.append(host)
    os.environ["PERDURE_STORE"] = f"127.0.0.1:{port[0]}"
    os.environ["PERDURE_GENERATION"] = str(len(stores))
    checkpointer = Checkpointer(every=1)
    return checkpointer, checkpointer.restore(state)


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        assert checkpointer.save(step, {"weight": torch.full((1000,), 100.0 * rank + step)})
        checkpointer.flush()
        # A rank that runs ahead saves nothing rather than overwrite the step that both have.
        dist.barrier()


stores: list[Any] = []
receivers: list[CopyReceiver] = []
memory = Path(os.environ["PERDURE_MEMORY_DIR"])
dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"]
os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
found: list[str] = []
state: dict[str, Any] = {"weight": torch.zeros(1000)}
begin_node(str(rank))
checkpointer, step = restored(state)
assert step is None
save(checkpointer, 1, 2, 3, 4, 5)
for turn, lost in enumerate((1, 0, 1, 1)):
    if turn == DAMAGED and rank != lost:
        arena = Arena(Path(os.environ["PERDURE_MEMORY_DIR"]) / "stage-0" / "state")
        copies = [(header.step, slot.path) for slot, header in arena.snapshots() if header.rank == lost]
        with max(copies)[1].open("r+b") as file:
            file.seek(PAGE + 100)
            [byte] = file.read(1)
            file.seek(PAGE + 100)
            file.write(bytes([byte ^ 1]))
    if rank == lost:
        shutil.rmtree(os.environ["PERDURE_MEMORY_DIR"])
        receivers[-1].close()
        begin_node(f"replacement-{turn}")
    state = {"weight": torch.zeros(1000)}
    checkpointer, step = restored(state)
    found.append(f"{step}:{state['weight'].unique().tolist()}")
    if turn:
        save(checkpointer, 10 * turn, 10 * turn + 1)
    else:
        # The loaded step is copied to the new node before any other is saved.
        checkpointer.flush()
        dist.barrier()
# One write: the ranks share the pipe.
os.write(1, f"rank {rank}: {' '.join(found)}\n".encode())
dist.barrier()
dist.destroy_process_group()
