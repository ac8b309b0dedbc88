"""The job that every system runs: small, so that the restart dominates the measurement and not the training.

DDP over gloo, about 50 ms a step, a checkpoint on disk every 20 steps. It knows nothing of the system that started it,
except that BENCH_MEMORY has it also save every step by Perdure's library, and BENCH_FLASH by DLRover's flash checkpoint
as its documentation has it: every step in memory, each 20th on disk. Each rank appends a line per step, `time step
rank world_size pid`, to `steps.log`, and one per process to `starts.log`, `pid rank started imported grouped`, in the
folder that BENCH_FOLDER names.
"""
# The time of the first line is one of the results, so imports come after it.
# ruff: noqa: E402

import importlib
import os
import time

STARTED = time.time()

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IMPORTED = time.time()

STEP_SECONDS = 0.045
CHECKPOINT_EVERY = 20
LAST_STEP = 1_000_000


class Flash:
    """DLRover's flash checkpoint."""

    def __init__(self, folder: Path) -> None:
        # It is installed in another environment.
        ddp: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        self._kinds: Any = ddp.StorageType
        self._checkpointer: Any = ddp.DdpCheckpointer(str(folder))

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Loads the newest checkpoint; returns its step."""
        saved: dict[str, Any] = self._checkpointer.load_checkpoint()
        if not saved:
            return 0
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return int(saved["step"])

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        kind = self._kinds.DISK if step % CHECKPOINT_EVERY == 0 else self._kinds.MEMORY
        self._checkpointer.save_checkpoint(step, state, storage_type=kind)


def main() -> None:
    folder = Path(os.environ["BENCH_FOLDER"])
    checkpoint = folder / "checkpoint.pt"
    torch.set_num_threads(1)
    # Ray Train has created the group before.
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    grouped = time.time()
    rank, world_size, pid = dist.get_rank(), dist.get_world_size(), os.getpid()
    with (folder / "starts.log").open("a", encoding="utf-8") as starts:
        starts.write(f"{pid} {rank} {STARTED:.4f} {IMPORTED:.4f} {grouped:.4f}\n")

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    checkpointer, kept = None, {"model": model.module, "optimizer": optimizer}
    if "BENCH_MEMORY" in os.environ:
        from perdure_training.checkpoint import Checkpointer

        checkpointer = Checkpointer(every=1, replicated=True)
    step = (checkpointer.restore(kept) if checkpointer else None) or 0
    flash = None
    if "BENCH_FLASH" in os.environ:
        flash = Flash(folder / "flash")
        step = flash.restore(model.module, optimizer)
    if not step and checkpoint.exists():
        saved = torch.load(checkpoint, map_location="cpu")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    held, ballast = folder / "ballast", None
    generator = torch.Generator().manual_seed(rank)
    # Line-buffered and in append mode: a line is one write, and lines of several processes never mix.
    with (folder / "steps.log").open("a", buffering=1, encoding="utf-8") as steps:
        while step < LAST_STEP:
            inputs = torch.randn(64, 256, generator=generator)
            labels = torch.randint(0, 10, (64,), generator=generator)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            step += 1
            if checkpointer:
                checkpointer.save(step, kept)
            if flash:
                flash.save(step, model.module, optimizer)
            time.sleep(STEP_SECONDS)
            steps.write(f"{time.time():.4f} {step} {rank} {world_size} {pid}\n")
            if ballast is None and rank == world_size - 1 and "BENCH_BALLAST_MB" in os.environ:
                # Written page by page, and by the first world only, so that the next one does not start more slowly.
                ballast = b"" if held.exists() else b"x" * (int(os.environ["BENCH_BALLAST_MB"]) << 20)
                held.touch()
            if rank == 0 and not flash and step % CHECKPOINT_EVERY == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
