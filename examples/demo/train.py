"""Trains a small character model on the sources of Python's standard library, with torchrun.

Every step is kept in memory by Perdure's library, which does nothing without Perdure; every tenth step is on disk. The
order of the samples is the same in every run, and the ranks share the batch of each step, so an interrupted run takes
the same path as an uninterrupted one, regardless of the size of its worlds. Each rank writes down the samples that it
reads, so that the demo can count those that were read twice.

    torchrun --nproc-per-node 2 train.py --steps 300
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from perdure_training.checkpoint import Checkpointer
from perdure_training.shards import ElasticSampler

CONTEXT = 64
BATCH = 24
"""Samples of a step, over all ranks: worlds of 1, 2, 3 and 4 ranks can share them."""
EVALUATED = 20 * BATCH
"""Samples on which the final loss is measured."""
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


def batch(data: Tensor, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns the text of samples, and the bytes that follow each of theirs. Samples do not overlap."""
    starts = [sample * (CONTEXT + 1) for sample in samples]
    windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).long()
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
    generation = os.environ.get("PERDURE_GENERATION", "0")

    data = corpus()
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / "checkpoint.pt"
    # The last samples are for the evaluation.
    trained_on = len(data) // (CONTEXT + 1) - EVALUATED
    sampler = ElasticSampler(trained_on)
    checkpointer = Checkpointer(every=1, replicated=True)
    trained = {"model": model, "optimizer": optimizer, "sampler": sampler}
    step = checkpointer.restore(trained)
    if step is None:
        step = 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            sampler.load_state_dict(state["sampler"])
            step = state["step"]
    parallel = DistributedDataParallel(model)
    order, share = iter(sampler), BATCH // world_size
    with (
        (options.out / "steps.csv").open("a", buffering=1) as log,
        (options.out / f"samples-{rank}.csv").open("a", buffering=1) as read,
    ):
        while step < options.steps:
            samples = list(islice(order, share))
            # Before the gradients are shared: from then on the step counts where any rank saves it.
            read.write(f"{generation},{step + 1},{' '.join(map(str, samples))}\n")
            text, following = batch(data, samples)
            loss = cross_entropy(parallel(text).flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sampler.advance(share)
            step += 1
            checkpointer.save(step, trained)
            if rank == 0:
                log.write(f"{time.time():.3f},{step},{loss.item():.5f},{world_size}\n")
                if step % 20 == 0 or step == options.steps:
                    print(f"step {step}/{options.steps} loss {loss.item():.4f} on {world_size} ranks", flush=True)
            if rank == 0 and (step % SAVE_EVERY == 0 or step == options.steps):
                partial = checkpoint.with_suffix(".partial")
                saved = {name: value.state_dict() for name, value in trained.items()}
                torch.save(saved | {"step": step}, partial)
                os.replace(partial, checkpoint)
    if rank == 0:
        # Evaluate on fixed batches, so that the loss can be compared between runs.
        with torch.no_grad():
            held_back = range(trained_on, trained_on + EVALUATED)
            losses = [
                cross_entropy(model(text).flatten(0, 1), following.flatten())
                for text, following in (batch(data, held_back[at : at + BATCH]) for at in range(0, EVALUATED, BATCH))
            ]
        (options.out / "final_loss").write_text(f"{torch.stack(losses).mean().item():.4f}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
