"""Trains a model that FSDP2 splits, with an optimizer, a scheduler and averaged parameters in dictionaries and lists;
continues what worlds of other sizes saved, and prints checksums of all that the state has. On nodes it also writes down
the bytes that other ranks have sent to each, and those of its parameters.

The arguments are the generation and, for ranks on several nodes that have no storage, the number of ranks of a node."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from perdure_launcher.system.ports import PortPool
from perdure_training.checkpoint import Checkpointer
from perdure_training.checkpoint.values import capture
from perdure_training.snapshots.copies import CopyReceiver


def fresh() -> dict[str, Any]:
    torch.manual_seed(dist.get_world_size())
    model = nn.Sequential(nn.Linear(8, 10), nn.LayerNorm(10), nn.Linear(10, 7, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    return {"model": model, "optimizers": {"main": optimizer}, "others": [scheduler, average], "step": 0}


def train(state: dict[str, Any], steps: int) -> None:
    optimizer, (scheduler, average) = state["optimizers"]["main"], state["others"]
    for _ in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * state["step"] + dist.get_rank()))
        state["model"](batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for one, parameter in zip(average, state["model"].parameters(), strict=True):
                one.lerp_(parameter, 0.1)
        state["step"] += 1


def checksum(value: Any, before: int = 0) -> int:
    """Of whole tensors, however they are split."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return zlib.crc32(value.contiguous().numpy().tobytes(), before)
    if isinstance(value, dict | list | tuple):
        parts = [value[name] for name in sorted(value, key=str)] if isinstance(value, dict) else value
        for part in parts:
            before = checksum(part, before)
        return before
    return zlib.crc32(repr(value).encode(), before)


def begin_node(ranks: int) -> CopyReceiver | None:
    """Gives this rank and its neighbors a node with a memory of its own, which takes copies of another's."""
    number, local_rank = divmod(dist.get_rank(), ranks)
    node = Path(os.environ["PERDURE_MEMORY_DIR"], f"node-{number}")
    os.environ |= {"PERDURE_MEMORY_DIR": str(node), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks)}
    if local_rank:
        return None
    node.mkdir(parents=True, exist_ok=True)
    pool = PortPool("127.0.0.1", listening=True, size=1)
    receiver = CopyReceiver(node, pool.take(pool.numbers[0]), host="127.0.0.1")
    os.environ["PERDURE_COPIES"] = receiver.address.dump()
    return receiver


dist.init_process_group("gloo")
on_nodes = len(sys.argv) > 2
receiver = begin_node(int(sys.argv[2])) if on_nodes else None
host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
port: list[Any] = [host.port if host else None]
dist.broadcast_object_list(port)
os.environ |= {"PERDURE_STORE": f"127.0.0.1:{port[0]}", "PERDURE_RUN_ID": "run", "TORCHELASTIC_RUN_ID": "run"}
os.environ["PERDURE_GENERATION"] = sys.argv[1]
checkpointer = Checkpointer(every=1, copies=1 if on_nodes else 0)
state = fresh()
step = checkpointer.restore(state)
restored = checksum(capture(state))
if on_nodes and checkpointer._world is not None:
    parts = [parameter.to_local().nbytes for parameter in state["model"].parameters()]
    known = Path(os.environ["PERDURE_MEMORY_DIR"]).with_name(f"received-{dist.get_rank()}")
    known.write_text(f"{checkpointer._world.received} {sum(parts)}")
train(state, 2)
assert checkpointer.save(state["step"], state, durable=not on_nodes)
assert on_nodes or checkpointer.wait_until_durable(100)
checkpointer.flush()
saved = checksum(capture(state))
# One write: the ranks share the pipe.
os.write(1, f"{step} {restored} {state['step']} {saved}\n".encode())
dist.barrier()
dist.destroy_process_group()
