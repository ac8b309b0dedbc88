"""Trains with checkpoints in memory: after a failure the ranks continue with the step that they had.

    perdure run --nodes 2 -- torchrun plain.py --steps 400

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
from torch.nn.parallel import DistributedDataParallel

from perdure_training import report
from perdure_training.checkpoint import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small model, and keeps every step in memory.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    options.out.mkdir(parents=True, exist_ok=True)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # With DistributedDataParallel every rank has the whole state, so a new node can take it from any other one.
    checkpointer = Checkpointer(every=1, replicated=True)
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
            # The last step, too, is in storage if the job has one.
            checkpointer.save(state["step"], state, durable=state["step"] == options.steps)
            time.sleep(options.pause)
    checkpointer.wait_until_durable(60)
    if rank == 0:
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        (options.out / "digest").write_text(hashlib.sha256(parameters).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
