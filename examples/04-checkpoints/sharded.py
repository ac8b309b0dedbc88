"""Trains a model that FSDP2 splits over the ranks: each node keeps its part in memory, and the next node a copy of it.

    perdure run --nodes 2 -- torchrun sharded.py --steps 400

It runs the same without Perdure, where it keeps nothing in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from perdure_training import report
from perdure_training.checkpoint import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small model in parts, and keeps every step in memory.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options.out.mkdir(parents=True, exist_ok=True)

    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Each rank has a part of the state, so a copy of it goes to another node.
    checkpointer = Checkpointer(every=1)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    checkpointer.restore(state)
    with (options.out / f"steps-{rank}").open("a", buffering=1) as log:
        while state["step"] < options.steps:
            # A step's batch depends on the step and the rank only, so that a step that is made again is the same.
            seed = torch.Generator().manual_seed(state["step"] * world_size + rank)
            loss = model(torch.randn(8, 32, generator=seed)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1
            report(step=state["step"], total=options.steps, loss=loss)
            log.write(f"{time.time():.3f} {state['step']} {world_size}\n")
            checkpointer.save(state["step"], state)
            time.sleep(options.pause)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        digest.update(parameter.full_tensor().detach().numpy().tobytes())
    if rank == 0:
        (options.out / "digest").write_text(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
