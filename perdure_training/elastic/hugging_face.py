"""Global batches for Hugging Face's Trainer: its steps have the same samples in a world of any size.

    from perdure_training.elastic.hugging_face import GlobalBatchCallback

    batch = GlobalBatchCallback(512, micro_batch=16)
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[batch])
    batch.prepare(trainer)
    trainer.train()

It sets the sizes of batches and their number in a step: the arguments' `per_device_train_batch_size` and
`gradient_accumulation_steps` do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from perdure_training.elastic.batch_sampler import GlobalBatchSampler
from perdure_training.elastic.global_batch import GlobalBatch

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

_IGNORED = -100
"""The label of tokens that do not count."""


class GlobalBatchCallback(TrainerCallback):
    """Has the Trainer accumulate the micro-batches of a `GlobalBatch`, each with its weight in the mean.

    A loss that is a mean over tokens (of a model that takes `num_items_in_batch`, or of `compute_loss_func`) is the
    mean over the tokens of the global batch; any other one is the mean over its samples.
    """

    def __init__(self, samples: int, *, micro_batch: int | None = None) -> None:
        """Creates the callback.

        Args:
            samples: Samples of a step, over all ranks.
            micro_batch: The most samples that fit into a rank's memory; None where all do.

        Raises:
            ValueError: if an argument is out of range.
        """
        self._batch = GlobalBatch(samples, micro_batch=micro_batch)
        self._micro_batches = tuple(self._batch)
        self._done = 0
        """Micro-batches of the present step that were computed."""

    def prepare(self, trainer: Trainer) -> None:
        """Sets the Trainer up: call it before `train`, and before `MemoryCheckpoints.resume`.

        Raises:
            ValueError: if the Trainer reads or splits its data in a way that leaves no room for this.
        """
        _check(trainer)
        arguments: Any = trainer.args
        world = arguments.world_size
        self._batch = GlobalBatch(
            self._batch.samples,
            micro_batch=self._batch.micro_batch,
            rank=arguments.process_index,
            world_size=world,
        )
        self._micro_batches = tuple(self._batch)
        arguments.gradient_accumulation_steps = len(self._micro_batches)
        arguments.per_device_train_batch_size = max(len(micro.positions) for micro in self._micro_batches)
        # Means over tokens are otherwise those of each rank.
        arguments.average_tokens_across_devices = world > 1
        parts: Any = trainer
        read, compute = parts.get_batch_samples, parts.compute_loss

        def get_batch_samples(batches: Iterator[Any], *others: Any, **named: Any) -> Any:
            return read(self._without_repeated(trainer, batches), *others, **named)

        def compute_loss(model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
            return self._weighted(trainer, model, compute(model, inputs, *others, **named), named)

        parts.get_train_dataloader = lambda: self._loader(trainer)
        parts.get_batch_samples, parts.compute_loss = get_batch_samples, compute_loss

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins with the first micro-batch. The Trainer calls it."""
        self._done = 0

    def _loader(self, trainer: Any) -> DataLoader[Any]:
        arguments, dataset, collate = trainer.args, trainer.train_dataset, trainer.data_collator
        if hasattr(dataset, "column_names"):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="training")
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        sampler = GlobalBatchSampler(len(dataset), self._batch, shuffle=_shuffles(arguments), seed=seed)
        return _Loader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=arguments.dataloader_num_workers,
            pin_memory=arguments.dataloader_pin_memory,
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor,
        )

    def _without_repeated(self, trainer: Any, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a step, where the tokens of repeated samples do not count."""
        # The batches of the next step are read with another call.
        for micro, inputs in zip(self._micro_batches, batches, strict=False):
            if micro.weight == 0 and _counts_tokens(trainer) and "labels" in inputs:
                inputs["labels"].fill_(_IGNORED)
            yield inputs

    def _weighted(self, trainer: Any, model: Any, computed: Any, named: dict[str, Any]) -> Any:
        if not model.training:
            return computed
        micro = self._micro_batches[self._done]
        self._done += 1
        if _is_scaled(trainer, named.get("num_items_in_batch")):
            return computed
        # The Trainer divides by the number of micro-batches.
        factor = micro.weight * len(self._micro_batches)
        return (computed[0] * factor, *computed[1:]) if isinstance(computed, tuple) else computed * factor


class _Loader(DataLoader[Any]):
    def set_epoch(self, epoch: int) -> None:
        loader: Any = self
        loader.batch_sampler.set_epoch(epoch)


def _check(trainer: Any) -> None:
    arguments = trainer.args
    if isinstance(trainer.train_dataset, IterableDataset) or not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError("GlobalBatchCallback: the dataset has no indices and no length; it must have both")
    if trainer.is_deepspeed_enabled:
        raise ValueError("GlobalBatchCallback: DeepSpeed accumulates gradients by itself; use DDP or FSDP")
    if arguments.n_gpu > 1:
        raise ValueError(f"GlobalBatchCallback: one process has {arguments.n_gpu} GPUs; start it with torchrun")
    _shuffles(arguments)


def _shuffles(arguments: Any) -> bool:
    strategy = str(getattr(arguments, "train_sampling_strategy", "random"))
    if strategy not in ("random", "sequential") or getattr(arguments, "group_by_length", False):
        raise ValueError(
            f"GlobalBatchCallback: the order of samples depends on their lengths (train_sampling_strategy {strategy}); "
            "expected random or sequential"
        )
    return strategy == "random"


def _counts_tokens(trainer: Any) -> bool:
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _is_scaled(trainer: Any, items: Any) -> bool:
    """Whether the loss is a share of the mean over the global batch, as in `Trainer.training_step`."""
    told = getattr(trainer, "loss_is_scaled_for_ga", None)
    if told is not None:
        return bool(told)
    return bool(trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
