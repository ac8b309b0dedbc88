"""Lightning's Trainer as its tutorials use it, with the boring model of its own package and its last checkpoint."""

import os
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

PACE = float(os.environ.get("STEP_SECONDS", "0.05"))
"""Seconds of sleep per step, which simulate the compute of a larger model."""


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        time.sleep(PACE)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(out: Path, epochs: int) -> None:
    lightning.seed_everything(0)
    last = out / "last.ckpt"
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=epochs,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=out, save_last=True, save_top_k=0, every_n_epochs=1)],
    )
    loader = DataLoader(RandomDataset(32, 256), batch_size=16, shuffle=True)
    trainer.fit(Model(), loader, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
