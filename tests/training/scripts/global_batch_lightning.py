"""Trains 12 steps of 7 samples with Lightning's Trainer, and saves the parameters: global_batch_lightning.py
MICRO_BATCH OUT [STEPS]; it resumes what an earlier call has left."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import Dataset

from perdure_training.elastic.lightning import GlobalBatchCallback

SAMPLES, STEPS = 7, 12


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return (self.layers(batch) - batch.sin()).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


class SaveAndStop(Callback):
    """Saves in the middle of an epoch; at the end of `fit`, Lightning takes the epoch for ended."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *others: Any) -> None:
        if steps and trainer.global_step == int(steps[0]) and not trainer.should_stop:
            trainer.save_checkpoint(left)
            trainer.should_stop = True


micro_batch, out, *steps = sys.argv[1:]
torch.manual_seed(0)
model = Model().double()
left = Path(out).with_suffix(".ckpt")
world_size = int(os.environ["WORLD_SIZE"])
batch = GlobalBatchCallback(SAMPLES, micro_batch=int(micro_batch))
trainer = Trainer(
    max_steps=STEPS,
    accelerator="cpu",
    strategy="ddp",
    devices=world_size,
    precision="64-true",
    callbacks=[SaveAndStop(), batch],
    use_distributed_sampler=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
resumed = str(left) if left.exists() else None
trainer.fit(model, batch.loader(Samples()), ckpt_path=resumed)
if trainer.global_rank == 0:
    torch.save({name: value.detach() for name, value in model.named_parameters()}, out)
    print(f"ended at {trainer.global_step}, from {resumed}", flush=True)
