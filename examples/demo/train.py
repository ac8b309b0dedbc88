"""Trains a small character model on the sources of Python's standard library, with torchrun.

Every step is kept in memory by Perdure's library, which does nothing without Perdure; every tenth step is on disk. The
global batch of a step depends on the step's number only and is split over the ranks, so an interrupted run takes
the same path as an uninterrupted one, regardless of the size of its worlds.

    torchrun --nproc-per-node 2 train.py --steps 300
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from perdure_training.checkpoint import Checkpointer

CONTEXT = 64
BATCH = 24
SAVE_EVERY = 10


class CharacterModel(nn.Module):
    """A GRU with two layers over bytes."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(text))[0])


def corpus() -> Tensor:
    """Returns the standard library's modules as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(data: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Returns the global batch of a step, which is the same in every run."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=random)
    windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a character model on the standard library.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    data = corpus()
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / "checkpoint.pt"
    checkpointer = Checkpointer(every=1, replicated=True)
    trained = {"model": model, "optimizer": optimizer}
    step = checkpointer.restore(trained)
    if step is None:
        step = 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
    parallel = DistributedDataParallel(model)
    with (options.out / "steps.csv").open("a", buffering=1) as log:
        while step < options.steps:
            text, following = (part[rank::world_size] for part in batch(data, step))
            loss = cross_entropy(parallel(text).flatten(0, 1), following.flatten(), reduction="sum")
            # DDP averages over ranks, whose shares may differ by one window.
            loss = loss * world_size / (BATCH * CONTEXT)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            checkpointer.save(step, trained)
            if rank == 0:
                log.write(f"{time.time():.3f},{step},{loss.item():.5f},{world_size}\n")
                if step % 20 == 0 or step == options.steps:
                    print(f"step {step}/{options.steps} loss {loss.item():.4f} on {world_size} ranks", flush=True)
            if rank == 0 and (step % SAVE_EVERY == 0 or step == options.steps):
                partial = checkpoint.with_suffix(".partial")
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
                os.replace(partial, checkpoint)
    if rank == 0:
        # Evaluate on fixed batches, so that the loss can be compared between runs.
        with torch.no_grad():
            losses = [
                cross_entropy(model(text).flatten(0, 1), following.flatten())
                for text, following in (batch(data, 1_000_000 + number) for number in range(20))
            ]
        (options.out / "final_loss").write_text(f"{torch.stack(losses).mean().item():.4f}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
