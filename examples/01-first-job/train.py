"""An ordinary DDP script: it uses torchrun and its own checkpoint, and nothing of Perdure.

It learns which arm of a spiral a point lies on, on CPUs. Every process takes its share of a global batch whose size
does not depend on the world's; rank 0 saves a checkpoint periodically, and each start resumes from it.

    torchrun --nproc-per-node 2 train.py --steps 300
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

ARMS = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learns the arms of a spiral.")
    parser.add_argument("--steps", type=int, default=2000, help="total steps, including those before a restart")
    parser.add_argument("--batch", type=int, default=512, help="points per step, over all processes")
    parser.add_argument("--width", type=int, default=256, help="width of the hidden layers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the checkpoint")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--print-every", type=int, default=10, help="steps between lines")
    return parser.parse_args()


def points(count: int, *, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns the points of this step and rank; they are the same after a restart."""
    random = torch.Generator().manual_seed(step * 10_000 + rank)
    arm = torch.randint(ARMS, (count,), generator=random)
    radius = torch.rand(count, generator=random)
    noise = 0.05 * torch.randn(count, 2, generator=random)
    angle = 4 * radius + arm * (2 * torch.pi / ARMS)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + noise, arm


def save(path: Path, state: dict[str, object]) -> None:
    """Saves to a new file and renames it, so that a crash during the save keeps the old checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    model = nn.Sequential(
        nn.Linear(2, options.width),
        nn.ReLU(),
        nn.Linear(options.width, options.width),
        nn.ReLU(),
        nn.Linear(options.width, ARMS),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = options.out / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    if rank == 0:
        print(f"world of {world_size}, from step {step} of {options.steps}", flush=True)

    parallel = DistributedDataParallel(model)
    share = options.batch // world_size + (rank < options.batch % world_size)
    while step < options.steps:
        inputs, arms = points(share, step=step, rank=rank)
        # DDP averages over ranks; shares may differ by one point.
        loss = cross_entropy(parallel(inputs), arms, reduction="sum") * world_size / options.batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and (step % options.print_every == 0 or step == options.steps):
            print(f"step {step}/{options.steps} loss {loss.item():.4f}", flush=True)
        if rank == 0 and (step % options.save_every == 0 or step == options.steps):
            save(checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
