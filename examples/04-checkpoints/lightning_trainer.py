"""Trains a small model with Lightning's Trainer, and keeps every step in memory.

    perdure run --nodes 2 -- torchrun lightning_trainer.py --steps 200

It runs the same without Perdure, where it keeps nothing in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from perdure_training.checkpoint.lightning import MemoryCheckpoints


class Numbers(Dataset[Tensor]):
    """Random numbers, the same for an index each time."""

    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(32, generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # With dropout a restored generator of random numbers makes a difference.
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.layers(batch) - batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StepLog(Callback):
    """Writes down each step that is made, and has it take its time."""

    def __init__(self, path: Path, pause: float) -> None:
        self._file = path.open("a", buffering=1)
        self._pause = pause

    def on_train_batch_end(self, trainer: Trainer, *others: Any) -> None:
        self._file.write(f"{time.time():.3f} {trainer.global_step} {trainer.world_size}\n")
        time.sleep(self._pause)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small model, and keeps every step in memory.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    seed_everything(0)
    model = Model()
    memory = MemoryCheckpoints(every=1)
    trainer = Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        callbacks=[StepLog(options.out / f"steps-{os.environ.get('RANK', '0')}", options.pause), memory],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    # An epoch has 40 steps in a world of 2: the epoch's data continue where they were, too.
    trainer.fit(model, DataLoader(Numbers(), batch_size=8, shuffle=True), ckpt_path=memory.resume(trainer))
    if trainer.is_global_zero:
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        (options.out / "digest").write_text(hashlib.sha256(parameters).hexdigest())


if __name__ == "__main__":
    main()
