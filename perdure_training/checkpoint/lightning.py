"""Checkpoints in memory for Lightning's Trainer, of the package `lightning` or `pytorch_lightning`.

    from perdure_training.checkpoint.lightning import MemoryCheckpoints

    memory = MemoryCheckpoints()
    trainer = Trainer(callbacks=[memory], max_steps=10_000)
    trainer.fit(model, loader, ckpt_path=memory.resume(trainer))

The Trainer resumes from a file. So `resume` writes what was in memory to a file in the Trainer's own format. A Trainer
that resumes in the middle of an epoch begins the epoch's data again; the callback skips the batches that were trained
on.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from perdure_training.checkpoint.checkpointer import Checkpointer
from perdure_training.checkpoint.generators import Generators
from perdure_training.numbers import watch

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    # The two packages have the same classes twice, and a Trainer takes callbacks of its own package only.
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

_FILE = "memory.ckpt"
_ENDED_EPOCH = "perdure_ended_epoch"
"""Entry of a saved state, in which the end of the epoch was made."""


class MemoryCheckpoints(Callback):
    """Saves each step of a Trainer into memory, for one device or DistributedDataParallel, on one or more nodes.

    The Trainer's own checkpoints are as before; keep them, since memory is lost with the last node.
    """

    def __init__(self, *, every: int | Literal["auto"] = "auto", max_overhead: float = 0.03) -> None:
        """Creates the callback.

        Args:
            every: As `Checkpointer`'s.
            max_overhead: As `Checkpointer`'s.

        Raises:
            ValueError: if an argument is out of range.
        """
        super().__init__()
        self._checkpointer = Checkpointer(
            every=every, max_overhead=max_overhead, replicated=True, name="lightning", storage=False
        )
        self._generators = _LaterGenerators()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._saved_step = 0
        self._ended_epoch = False
        """Whether the restored step was the last of an epoch whose end was made."""
        self._followed: Trainer | None = None
        self._loops: dict[str, Any] | None = None
        """The progress that the Trainer continues from after an epoch, as of the end of its last batch."""

    def resume(self, trainer: Trainer, otherwise: str | None = None) -> str | None:
        """Returns what to pass to `Trainer.fit` as `ckpt_path`. Call it on every rank, before `fit`.

        Args:
            trainer: The Trainer that has this callback.
            otherwise: What to resume from if nothing is in memory: a checkpoint's path, or what else `fit` takes.

        Raises:
            ValueError: if the Trainer splits the model over ranks (FSDP, DeepSpeed), which needs the whole of it here.
        """
        strategy: Any = trainer.strategy
        if strategy.restore_checkpoint_after_setup:
            raise ValueError(
                f"MemoryCheckpoints: {type(strategy).__name__} splits the model over ranks; it must be whole"
            )
        # Ranks agree on a step over their process group. The Trainer finds it made when it begins.
        strategy.setup_environment()
        state: dict[str, Any] = {"trainer": None, "generators": self._generators}
        step = self._checkpointer.restore(state)
        if step is None:
            return otherwise
        self._saved_step = step
        self._ended_epoch = bool(state["trainer"].pop(_ENDED_EPOCH, False))
        self._folder = tempfile.TemporaryDirectory(prefix="perdure-resume-")
        path = Path(self._folder.name) / _FILE
        torch.save(state["trainer"], path)
        return str(path)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continues with the batch that comes next. The Trainer calls it."""
        if self._followed is not trainer:
            self._followed = trainer
            self._follow(trainer)
        if self._folder is None:
            return
        # The Trainer has loaded the checkpoint: its temporary folder can go.
        self._folder.cleanup()
        self._folder = None
        if self._ended_epoch:
            # The Trainer makes the validation's iterator again, which was saved as having drawn its numbers.
            _keep_generators(trainer.fit_loop.epoch_loop.val_loop, "increment_progress_to_evaluation_end")
        _skip_batches(trainer, then=self._generators.continue_drawing)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Follows the loss. The Trainer calls it."""
        # Other batches only add to gradients.
        if trainer.global_step > self._saved_step:
            watch.follow(trainer.global_step, loss=_loss(trainer, outputs))

    def _follow(self, trainer: Any) -> None:
        """Has each step saved once all callbacks and the module have seen its end, and that of the validation or the
        epoch that ends with it: what they keep belongs to the step."""
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop

        def end_batch() -> None:
            # Validations have batches, too.
            if not trainer.training:
                return
            if epoch._is_training_done:
                # The Trainer skips the rest of an epoch that a restart has found here, but repeats its end after it.
                self._loops = trainer._checkpoint_connector._get_loops_state_dict()
            elif not epoch._should_check_val_fx(fit._data_fetcher):
                self._save(trainer)

        def end_validation() -> None:
            if not trainer.sanity_checking and not epoch._is_training_done:
                self._save(trainer)

        def end_epoch() -> None:
            self._save(trainer, loops=self._loops)
            self._loops = None

        # These follow the hooks `on_train_batch_end`, `on_validation_end` and `on_train_epoch_end` of all.
        _call_after(trainer._logger_connector, "on_batch_end", end_batch)
        _call_after(epoch.val_loop, "run", end_validation)
        _call_after(fit, "on_advance_end", end_epoch)

    def _save(self, trainer: Trainer, *, loops: dict[str, Any] | None = None) -> None:
        # Other batches only add to gradients.
        if trainer.global_step > self._saved_step:
            self._saved_step = trainer.global_step
            state = {"trainer": _Checkpoint(trainer, loops), "generators": self._generators}
            self._checkpointer.save(trainer.global_step, state)


def _call_after(instance: Any, name: str, call: Callable[[], None]) -> None:
    """Has a call follow each of a method of this instance."""
    method = getattr(instance, name)

    @functools.wraps(method)
    def both(*arguments: Any, **named: Any) -> Any:
        try:
            result = method(*arguments, **named)
        except SystemExit as error:
            # With this one the Trainer ends the method where it has received SIGTERM.
            if type(error).__name__ == "SIGTERMException":
                call()
            raise
        call()
        return result

    setattr(instance, name, both)


def _keep_generators(instance: Any, name: str) -> None:
    """Has a method of this instance, which some releases lack, draw no numbers."""
    method = getattr(instance, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def kept() -> None:
        before = Generators().state_dict()
        method()
        Generators().load_state_dict(before)

    setattr(instance, name, kept)


def _loss(trainer: Any, outputs: Any) -> float | None:
    """The batch's loss; None where it is not known, or reading it would make most steps wait for a GPU."""
    loss = cast("dict[str, Any]", outputs).get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return None
    read = loss.device.type == "cpu" or trainer.global_step % trainer.log_every_n_steps == 0
    return float(loss) if read else None


class _Checkpoint:
    """What the Trainer writes to a checkpoint's file, on every rank."""

    def __init__(self, trainer: Trainer, loops: dict[str, Any] | None) -> None:
        self._trainer = trainer
        self._loops = loops

    def state_dict(self) -> dict[str, Any]:
        # `Trainer.save_checkpoint` has a barrier, and gives only the first rank its content.
        connector: Any = self._trainer._checkpoint_connector  # pyrefly: ignore[protected-access]
        content = cast("dict[str, Any]", connector.dump_checkpoint(weights_only=False))
        return content if self._loops is None else content | {"loops": self._loops, _ENDED_EPOCH: True}


class _LaterGenerators(Generators):
    """Generators whose restored state counts once the training continues: what comes before it draws numbers, too."""

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def continue_drawing(self) -> None:
        if self._restored is not None:
            super().load_state_dict(self._restored)
            self._restored = None


def _skip_batches(trainer: Trainer, *, then: Any) -> None:
    """Leaves out the epoch's batches that were trained on, unless the loaders have done it themselves.

    Args:
        trainer: A Trainer that has just resumed.
        then: Restores the generators. A new epoch's iterator draws from them; one that is continued has drawn before.
    """
    loop: Any = trainer.fit_loop
    loaders, fetcher = loop._combined_loader, loop._data_fetcher
    if loaders is None or fetcher is None or loaders._state_dicts():
        then()
        return
    for loader in loaders.flattened:
        _set_epoch(loader, loop.epoch_progress.current.processed)
    done = int(loop.epoch_loop.batch_progress.current.ready)
    if done >= loop.max_batches:
        then()
        iter(fetcher)
        return
    iter(fetcher)
    for _ in range(done):
        next(fetcher)
    # The Trainer adds the batches that were done before.
    fetcher.fetched -= done
    then()


def _set_epoch(loader: Any, epoch: int) -> None:
    """Has the loader's sampler shuffle as in that epoch; the Trainer does so too late for worker processes."""
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
