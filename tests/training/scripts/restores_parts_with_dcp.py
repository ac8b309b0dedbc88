"""The same as restores_parts.py, with DCP's own functions."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from perdure_training.checkpoint import MemoryWriter, dcp_writer


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


def writer() -> MemoryWriter:
    """Creates a writer as the ranks of a new generation do, which has a store of its own."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    port: list[Any] = [host.port if host else None]
    dist.broadcast_object_list(port)
    os.environ["PERDURE_STORE"] = f"127.0.0.1:{port[0]}"
    stores.append(host)
    return dcp_writer()


def as_dict(state: dict[str, Any], step: int) -> dict[str, Any]:
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    return {"model": model, "optimizer": optimizer, "step": step}


stores: list[Any] = []
dist.init_process_group("gloo")
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"]
first = fresh()
memory = writer()
assert memory.step is None
train(first, 2)
save(as_dict(first, 2), storage_writer=memory, checkpoint_id="step-2")
memory.flush()
train(first, 3)
dist.barrier()
second = fresh()
memory = writer()
assert memory.step == 2
found = as_dict(second, 0)
load(found, storage_reader=memory.reader())
assert found["step"] == 2
set_state_dict(
    second["model"], second["optimizer"], model_state_dict=found["model"], optim_state_dict=found["optimizer"]
)
train(second, 3)
same = all(torch.equal(one, other) for one, other in zip(parts(first), parts(second), strict=True))
# One write: the ranks share the pipe.
os.write(1, f"rank-{dist.get_rank()}:{same}\n".encode())
dist.barrier()
dist.destroy_process_group()
