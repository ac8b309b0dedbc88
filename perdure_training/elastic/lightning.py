"""Global batches for Lightning's Trainer: its steps have the same samples in a world of any size.

    from perdure_training.elastic.lightning import GlobalBatchCallback

    batch = GlobalBatchCallback(512, micro_batch=16)
    trainer = Trainer(callbacks=[batch], use_distributed_sampler=False)
    trainer.fit(model, batch.loader(dataset))

It sets `accumulate_grad_batches`, and is for automatic optimization, of the package `lightning` or `pytorch_lightning`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perdure_training.elastic.batch_sampler import GlobalBatchSampler
from perdure_training.elastic.global_batch import GlobalBatch

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    # The two packages have the same classes twice, and a Trainer takes callbacks of its own package only.
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

_COUNT = "micro_batches"


class GlobalBatchCallback(Callback):
    """Has the Trainer accumulate the micro-batches of a `GlobalBatch`, each with its weight in the mean.

    A training that resumes in a world of another size continues with the samples that come next.
    """

    def __init__(self, samples: int, *, micro_batch: int | None = None) -> None:
        """Creates the callback.

        Args:
            samples: Samples of a step, over all ranks.
            micro_batch: The most samples that fit into a rank's memory; None where all do.

        Raises:
            ValueError: if an argument is out of range.
        """
        super().__init__()
        self._batch = GlobalBatch(samples, micro_batch=micro_batch)
        self._micro_batches = tuple(self._batch)
        self._micro = self._micro_batches[0]
        self._loader: _Loader | None = None

    def loader(self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, **options: Any) -> DataLoader[Any]:
        """Returns the loader of the training's samples.

        Args:
            dataset: With indices and a length.
            shuffle: Permute the samples of each epoch, each epoch differently.
            seed: Of the permutations.
            options: Further ones of the DataLoader.

        Raises:
            ValueError: if the dataset has fewer samples than one step.
        """
        size = len(dataset)  # pyrefly: ignore[bad-argument-type]
        self._loader = _Loader(dataset, GlobalBatchSampler(size, self._batch, shuffle=shuffle, seed=seed), options)
        return self._loader

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the number of micro-batches in a step. The Trainer calls it.

        Raises:
            ValueError: if the Trainer shares samples out by itself, or its strategy accumulates by itself.
        """
        connector: Any = trainer._accelerator_connector  # pyrefly: ignore[protected-access]
        if connector.use_distributed_sampler and trainer.world_size > 1:
            raise ValueError("GlobalBatchCallback: expected Trainer(use_distributed_sampler=False)")
        strategy: Any = trainer.strategy
        if strategy.handles_gradient_accumulation:
            raise ValueError(
                f"GlobalBatchCallback: {type(strategy).__name__} accumulates gradients by itself; use DDP or FSDP"
            )
        trainer.accumulate_grad_batches = len(self._micro_batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Knows which micro-batch comes. The Trainer calls it."""
        self._micro = self._micro_batches[batch_idx % len(self._micro_batches)]
        if self._loader is not None:
            # Checkpoints are made after a batch, by callbacks in any order.
            self._loader.done = (batch_idx + 1) // len(self._micro_batches)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Gives the loss its weight. The Trainer calls it."""
        # The Trainer has divided it by the number of micro-batches, so it is a tensor of its own.
        loss.mul_(self._micro.weight * len(self._micro_batches))

    def state_dict(self) -> dict[str, Any]:
        """What is stored in a checkpoint. The Trainer calls it."""
        return {_COUNT: len(self._micro_batches)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Counts batches as this world does. The Trainer calls it."""
        before = checkpoint.get("callbacks", {}).get(self.state_key, {}).get(_COUNT)
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        progress = loop.get("epoch_loop.batch_progress")
        if before and progress is not None and before != len(self._micro_batches):
            loop["epoch_loop.batch_progress"] = _scaled(progress, len(self._micro_batches), before)


class _Loader(DataLoader[Any]):
    """A loader that continues where a checkpoint was made, as Lightning asks those to that have a state."""

    def __init__(self, dataset: Dataset[Any], sampler: GlobalBatchSampler, options: Mapping[str, Any]) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._steps = sampler
        self.done = 0
        """Steps of the epoch that were made."""

    def state_dict(self) -> dict[str, int]:
        ended, done = divmod(self.done, self._steps.steps)
        return {"epoch": self._steps.epoch + ended, "done": done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._steps.set_epoch(state["epoch"])
        self._steps.continue_after(state["done"])


def _scaled(progress: Mapping[str, Any], by: int, of: int) -> dict[str, Any]:
    """Counts of micro-batches at the end of a step, where a step has another number of them."""
    # The last batch has been trained on, and not all counts have it yet.
    return {
        name: {key: counts["ready"] // of * by - (counts["ready"] - count) for key, count in counts.items()}
        if name in ("total", "current")
        else counts
        for name, counts in progress.items()
    }
