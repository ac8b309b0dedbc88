"""Lightning's Trainer with as many devices as the node has ranks; saves once, and resumes from there."""

import os
import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

checkpoint = Path(os.environ["TEST_STEPS_DIR"]) / "fit.ckpt"


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


class SaveOnce(lightning.Callback):
    def on_fit_start(self, trainer, _):
        self.saved = checkpoint.exists()

    def on_train_start(self, trainer, _):
        if trainer.global_step:
            print("resumes from what was saved", flush=True)

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and not self.saved:
            trainer.save_checkpoint(checkpoint)


devices = int(sys.argv[1]) if sys.argv[1:] else int(os.environ["LOCAL_WORLD_SIZE"])
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=devices,
    num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
    max_epochs=-1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[SaveOnce()],
)
data = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
trainer.fit(Module(), data, ckpt_path=checkpoint if checkpoint.exists() else None)
