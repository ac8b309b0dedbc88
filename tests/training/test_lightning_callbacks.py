"""What a Lightning Trainer's callbacks keep is after a restart as if there had been none, wherever it happened."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.one_rank import World

pytestmark = [pytest.mark.long("frameworks"), pytest.mark.filterwarnings("ignore")]

BATCHES, STEPS = 6, 16


class Killed(Exception):
    pass


def trained(folder: Path, *, place: int, interval: float, killed_at: tuple[str, int] | None = None) -> dict[str, Any]:
    """Trains up to the last step, from what is in memory; returns what the callbacks and the module have then.

    Args:
        folder: Where the Trainer stores its checkpoints.
        place: Of `MemoryCheckpoints` among the callbacks.
        interval: Part of an epoch after which there is a validation.
        killed_at: The hook of the last callback at which the training ends, and the steps that are made by then.
    """
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint

    from perdure_training.checkpoint.lightning import MemoryCheckpoints

    class Model(LightningModule):
        average: Tensor
        epochs: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
            self.register_buffer("average", torch.zeros(8))
            self.register_buffer("epochs", torch.zeros(()))

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.layers(batch[0]).square().mean()

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.layers(batch[0]).square().mean())

        def on_train_batch_end(self, *_: Any) -> None:
            self.average.lerp_(next(self.layers.parameters()).detach().mean(0), 0.1)

        def on_train_epoch_end(self) -> None:
            self.epochs += 1

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Counts(Callback):
        """Counts hooks."""

        def __init__(self) -> None:
            self.seen: dict[str, int] = {}

        def _add(self, name: str) -> None:
            self.seen[name] = self.seen.get(name, 0) + 1

        def on_train_batch_end(self, *_: Any) -> None:
            self._add("batches")

        def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
            self._add("validations")

        def on_train_epoch_end(self, *_: Any) -> None:
            self._add("epochs")

        def state_dict(self) -> dict[str, Any]:
            return {"seen": dict(self.seen)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = dict(state["seen"])

    class Kills(Callback):
        pass

    def kill(self: Any, trainer: Trainer, *_: Any, **__: Any) -> None:
        if killed_at is not None and trainer.global_step == killed_at[1]:
            memory._checkpointer.flush()
            raise Killed

    if killed_at is not None:
        setattr(Kills, killed_at[0], kill)
    seed_everything(0)
    model, memory, counts = Model(), MemoryCheckpoints(every=1), Counts()
    stopping = EarlyStopping("loss", patience=100, min_delta=1.0, mode="min")
    best = ModelCheckpoint(folder / "best", monitor="loss", save_top_k=1)
    averaging = EMAWeightAveraging(decay=0.5)
    callbacks: list[Any] = [averaging, stopping, counts]
    callbacks.insert(place, memory)
    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        callbacks=[*callbacks, Kills(), best],
        num_sanity_val_steps=1,
        val_check_interval=interval,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    numbers = TensorDataset(torch.randn(BATCHES * 4, 8, generator=torch.Generator().manual_seed(1)))
    with suppress(Killed):
        trainer.fit(model, DataLoader(numbers, 4), DataLoader(numbers, 8), ckpt_path=memory.resume(trainer))
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "averaged": int(cast("Any", averaging)._average_model.n_averaged),
        "waited": stopping.wait_count,
        "best": float(stopping.best_score),
        "best stored": best.best_model_score.item() if best.best_model_score is not None else None,
        "counts": counts.seen,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    }


@pytest.mark.parametrize(
    ("place", "interval", "killed_at"),
    [
        (0, 1.0, [("on_train_batch_end", 4), ("on_validation_end", 6), ("on_train_batch_start", 6)]),
        (3, 0.5, [("on_train_batch_start", 4), ("on_train_batch_start", 9), ("on_train_epoch_end", 12)]),
    ],
    ids=["first-of-all", "last-of-all"],
)
def test_callbacks_and_the_module_continue_wherever_a_training_was_killed(
    world: World, tmp_path: Path, place: int, interval: float, killed_at: list[tuple[str, int]]
):
    world.next_generation()
    expected = trained(tmp_path / "expected", place=place, interval=interval)
    shutil.rmtree(world.folder)
    for killed in killed_at:
        world.next_generation()
        stopped = trained(tmp_path / "found", place=place, interval=interval, killed_at=killed)
        assert stopped["step"] == killed[1]
    world.next_generation()
    found = trained(tmp_path / "found", place=place, interval=interval)
    model, other = found.pop("model"), expected.pop("model")
    torch.testing.assert_close(model, other, rtol=0, atol=0)
    assert found == expected
