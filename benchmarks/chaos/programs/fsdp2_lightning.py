"""Lightning's Trainer with its `ModelParallelStrategy`: the model splits itself with FSDP2 where Lightning says so.

Lightning keeps no checkpoint in memory; a callback gives the state of such a model to Perdure's `Checkpointer`.
"""

import os
import sys
from pathlib import Path

import lightning
import torch
from kept import Keeper
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

WIDTH, BATCH = 64, 8
STEPS_OF_LENGTH = 10


class Samples(IterableDataset):
    """An endless stream."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        while True:
            inputs = torch.randn(WIDTH, generator=generator)
            yield inputs, inputs.flip(0).cumsum(0)


class Model(lightning.LightningModule):
    def configure_model(self):
        if hasattr(self, "layers"):
            return
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 100), nn.GELU(), nn.LayerNorm(100), nn.Linear(100, WIDTH))
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)]


class KeepsSteps(Callback):
    def __init__(self, out: Path, steps: int) -> None:
        self.out, self.steps = out, steps

    def on_train_start(self, trainer, pl_module):
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        self.state = {"model": pl_module, "optimizer": trainer.optimizers[0], "scheduler": scheduler, "step": 0}
        self.keeper = Keeper(self.out, pl_module, self.state)
        trainer.should_stop = self.state["step"] >= self.steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.state["step"] < self.steps:
            self.state["step"] += 1
            self.keeper.keep(self.state["step"])
        trainer.should_stop = self.state["step"] >= self.steps

    def on_train_end(self, trainer, pl_module):
        self.keeper.finish(self.state["step"])


def main(out: Path, length: int) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=ModelParallelStrategy(),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=1,
        callbacks=[KeepsSteps(out, length * STEPS_OF_LENGTH)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Model(), DataLoader(Samples(), batch_size=BATCH))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
