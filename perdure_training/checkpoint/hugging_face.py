"""Checkpoints in memory for Hugging Face's Trainer.

    from perdure_training.checkpoint.hugging_face import MemoryCheckpoints

    memory = MemoryCheckpoints()
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=[memory])
    trainer.train(resume_from_checkpoint=memory.resume(trainer))

The Trainer resumes from a folder. So `resume` writes what was in memory to a folder in the Trainer's own format,
from which it reads the state and skips the batches that were trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from perdure_training.checkpoint.checkpointer import Checkpointer
from perdure_training.numbers import watch

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

_PARTS = ("model", "optimizer", "scheduler", "generators", "trainer")
_FILES = {"model": "pytorch_model.bin", "optimizer": "optimizer.pt", "scheduler": "scheduler.pt"}


class MemoryCheckpoints(TrainerCallback):
    """Saves each step of a Trainer into memory, for training on one or more nodes with DistributedDataParallel.

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
        self._checkpointer = Checkpointer(
            every=every, max_overhead=max_overhead, replicated=True, name="trainer", storage=False
        )
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._accelerator: Any = None
        """The Trainer's, which has the scaler of gradients (fp16)."""
        self._unsaved: dict[str, Any] | None = None
        """What a step has trained that ended, and is saved once all callbacks have seen it."""
        self._ended_epoch = False

    def resume(self, trainer: Trainer, otherwise: str | bool | None = None) -> str | bool | None:
        """Returns what to pass to `Trainer.train` as `resume_from_checkpoint`. Call it on every rank.

        Args:
            trainer: The Trainer that has this callback.
            otherwise: What to resume from if nothing is in memory: a checkpoint's folder, or True for the last one in
                the output folder.

        Raises:
            ValueError: if the Trainer splits the model over ranks (FSDP, DeepSpeed), which needs the whole of it here.
        """
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError("MemoryCheckpoints: the Trainer splits the model (FSDP or DeepSpeed); it must be whole")
        self._accelerator = trainer.accelerator
        self._follow(trainer)
        state: dict[str, Any] = dict.fromkeys(_PARTS)
        if self._checkpointer.restore(state) is None:
            return otherwise
        self._folder = tempfile.TemporaryDirectory(prefix="perdure-resume-")
        _write(Path(self._folder.name), state, arguments=trainer.args)
        return self._folder.name

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Follows the loss and the norm of the gradients. The Trainer calls it every `logging_steps` steps."""
        loss, gradient_norm = ((logs or {}).get(name) for name in ("loss", "grad_norm"))
        watch.follow(
            state.global_step,
            loss=None if loss is None else float(loss),
            gradient_norm=None if gradient_norm is None else float(gradient_norm),
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Has the step saved. The Trainer calls it."""
        if self._folder is not None:
            # The Trainer has loaded the checkpoint: its temporary folder can go.
            self._folder.cleanup()
            self._folder = None
        self._unsaved = {
            "model": kwargs["model"],
            "optimizer": kwargs["optimizer"],
            "scheduler": kwargs["lr_scheduler"],
            "generators": _Generators(getattr(self._accelerator, "scaler", None)),
        }
        self._ended_epoch = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Has the epoch's last step saved. The Trainer calls it."""
        self._ended_epoch = True

    def _follow(self, trainer: Any) -> None:
        """Has each step saved once all callbacks have seen its end, and that of the evaluation or the epoch that ends
        with it: what they keep belongs to the step."""
        # The Trainer evaluates with it, and stores its own checkpoints, after the steps and the epochs.
        method = trainer._maybe_log_save_evaluate

        @functools.wraps(method)
        def both(*arguments: Any, **named: Any) -> None:
            method(*arguments, **named)
            if self._unsaved is not None and (self._ended_epoch or not _ends_epoch(trainer)):
                unsaved, self._unsaved = self._unsaved, None
                state = dataclasses.asdict(trainer.state) | {"stateful_callbacks": _exported_states(trainer)}
                unsaved["trainer"] = json.dumps(state, sort_keys=True)
                self._checkpointer.save(trainer.state.global_step, unsaved)

        trainer._maybe_log_save_evaluate = both


def _ends_epoch(trainer: Any) -> bool:
    """Whether the end of an epoch follows the step that has ended."""
    control = trainer.control
    return control.should_epoch_stop or control.should_training_stop or float(trainer.state.epoch).is_integer()


def _exported_states(trainer: Any) -> dict[str, Any]:
    """What callbacks keep, as the Trainer writes it to its checkpoints: a list where several are of one type."""
    states: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: found if len(found) > 1 else found[0] for name, found in states.items()}


class _Generators:
    """The random number generators, as the Trainer saves them, and the scaler of gradients, if there is one.

    Snapshots of older releases have no scaler, and the same names without it.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        if (numpy := sys.modules.get("numpy")) is not None:
            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state


def _write(folder: Path, state: Mapping[str, Any], *, arguments: Any) -> None:
    for name, file in _FILES.items():
        torch.save(state[name], folder / file)
    generators = dict(state["generators"])
    if (scaler := generators.pop("scaler", None)) is not None:
        torch.save(scaler, folder / "scaler.pt")
    if "cuda" in generators and arguments.world_size <= 1:
        generators["cuda"] = generators["cuda"][torch.cuda.current_device()]
    rank = f"_{arguments.process_index}" if arguments.world_size > 1 else ""
    torch.save(generators, folder / f"rng_state{rank}.pth")
    (folder / "trainer_state.json").write_text(state["trainer"], encoding="utf-8")
