"""The callback for Lightning: a training that is interrupted ends as one that is not, in the order of its data, too."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.training.one_rank import World

SAMPLES, BATCH, STEPS = 24, 4, 15
"""Epochs of six batches."""


class Interrupted(Exception):
    pass


class Numbers(Dataset[tuple[int, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


def training(
    folder: Path, *, stop_after: int | None = None, accumulate: int = 1
) -> tuple[dict[int, Any], list[Tensor]]:
    """Trains up to the last step, from what is in memory; returns the samples of each batch, by its number, and the
    parameters."""
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

    from perdure_training.checkpoint.lightning import MemoryCheckpoints

    batches: dict[int, Any] = {}

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.layers(batch[1]).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.layers(batch[1]).square().mean())

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            batches[self.trainer.fit_loop.epoch_loop.total_batch_idx] = (batch_idx, batch[0].tolist())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Interruption(Callback):
        def on_train_batch_start(self, trainer: Trainer, *others: Any) -> None:
            if trainer.global_step == stop_after:
                memory._checkpointer.flush()
                raise Interrupted

    seed_everything(0)
    model, memory = Model(), MemoryCheckpoints(every=1)
    trainer = Trainer(
        max_steps=STEPS // accumulate,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=[memory, Interruption()],
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = Numbers()
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, num_replicas=1, rank=0, shuffle=True))
    validation = DataLoader(data, SAMPLES)
    with suppress(Interrupted):
        trainer.fit(model, loader, validation, ckpt_path=memory.resume(trainer))
    return batches, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.long("frameworks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("accumulate", "stops"), [(1, (4,)), (1, (1, 6, 8, 12)), (2, (2, 3, 5))])
def test_an_interrupted_training_reads_the_same_batches_and_ends_with_the_same_parameters(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int, stops: tuple[int, ...]
):
    with monkeypatch.context() as outside:
        outside.delenv("PERDURE_MEMORY_DIR")
        expected, undisturbed = training(tmp_path, accumulate=accumulate)
    found: dict[int, Any] = {}
    for stop in (*stops, None):
        world.next_generation()
        batches, parameters = training(tmp_path, stop_after=stop, accumulate=accumulate)
        assert not batches.keys() & found.keys()
        found |= batches
    assert found == expected
    for one, other in zip(parameters, undisturbed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.long("frameworks")
def test_a_trainer_that_splits_the_model_is_refused(world: World):
    from lightning.pytorch import Trainer

    from perdure_training.checkpoint.lightning import MemoryCheckpoints

    world.next_generation()
    memory = MemoryCheckpoints()
    trainer = Trainer(callbacks=[memory], accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.__class__ = type(
        "FSDPStrategy", (type(trainer.strategy),), {"restore_checkpoint_after_setup": property(lambda _: True)}
    )
    with pytest.raises(ValueError, match="FSDPStrategy splits the model over ranks"):
        memory.resume(trainer)
