"""Trains a model that FSDP2 splits, begins again with what was saved, and compares both trainings."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from perdure_training.checkpoint import Checkpointer


def fresh() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        state["optimizer"].zero_grad()
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()


def parts(state: dict[str, Any]) -> list[torch.Tensor]:
    parameters = list(state["model"].parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    return [parameter.to_local().clone() for parameter in parameters]


def restored(state: dict[str, Any]) -> tuple[Checkpointer, int | None]:
    """Restores as the ranks of a new generation do, which has a store of its own."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port: list[Any] = [host.port if host else None]
    dist.broadcast_object_list(port)
    os.environ["PERDURE_STORE"] = f"127.0.0.1:{port[0]}"
    stores.append(host)
    checkpointer = Checkpointer(every=1)
    return checkpointer, checkpointer.restore(state)


stores: list[Any] = []
dist.init_process_group("gloo")
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"]
first = fresh()
checkpointer, step = restored(first)
assert step is None
train(first, 2)
checkpointer.save(2, first)
checkpointer.flush()
train(first, 3)
dist.barrier()
second = fresh()
_, step = restored(second)
assert step == 2
train(second, 3)
same = all(torch.equal(one, other) for one, other in zip(parts(first), parts(second), strict=True))
# One write: the ranks share the pipe.
os.write(1, f"rank-{dist.get_rank()}:{same}\n".encode())
dist.barrier()
dist.destroy_process_group()
