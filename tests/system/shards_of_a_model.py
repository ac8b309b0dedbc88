"""Saves a model that FSDP2 splits, with Perdure; or loads it in a world of another size, with torch alone, and compares
it with a file that has all its tensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

WIDTHS = (17, 64, 5)


def fresh(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.ReLU(), nn.Linear(WIDTHS[1], WIDTHS[2]))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state: dict[str, Any]) -> None:
    batch = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(5))
    for _ in range(3):
        state["optimizer"].zero_grad()
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()


def whole(state: dict[str, Any]) -> list[torch.Tensor]:
    """All parameters and moments, put together."""
    moments = [value for one in state["optimizer"].state_dict()["state"].values() for value in one.values()]
    tensors = [*state["model"].state_dict().values(), *moments]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]


dist.init_process_group("gloo")
if sys.argv[1] == "save":
    from perdure_training.checkpoint import Checkpointer

    state = fresh(1)
    checkpointer = Checkpointer(every=1)
    checkpointer.restore(state)
    train(state)
    saved = whole(state)
    if dist.get_rank() == 0:
        torch.save(saved, sys.argv[2])
    assert checkpointer.save(3, state, durable=True)
    assert checkpointer.wait_until_durable(100)
else:
    loaded = fresh(2)
    train(loaded)
    target = {name: value.state_dict() for name, value in loaded.items()}
    checkpoint.load(target, checkpoint_id=Path(sys.argv[3]))
    for name, value in loaded.items():
        value.load_state_dict(target[name])
    pairs = list(zip(torch.load(sys.argv[2]), whole(loaded), strict=True))
    same = all(torch.equal(one, other) for one, other in pairs)
    assert not any(name.startswith("perdure") for name in sys.modules)
    # One write: the ranks share the pipe.
    os.write(1, f"rank-{dist.get_rank()}:{'same' if same else 'other'}\n".encode())
dist.barrier()
dist.destroy_process_group()
