"""What a Trainer of Hugging Face's resumes with from memory."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from tests.training.one_rank import World

pytestmark = pytest.mark.long("frameworks")


class Model(nn.Module):
    """Learns to give zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(inputs).square().mean()}


def test_the_scaler_of_gradients_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import Trainer, TrainingArguments

    from perdure_training.checkpoint.hugging_face import MemoryCheckpoints

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    identity = {"PERDURE_MEMORY_DIR": str(tmp_path / "memory"), "PERDURE_RUN_ID": "run", "TORCHELASTIC_RUN_ID": "run"}
    where = {"PERDURE_STORE": f"127.0.0.1:{store.port}"}

    def trained(generation: int, steps: int) -> tuple[Any, Any]:
        """Trains up to this many steps; returns the Trainer, and what it resumed from."""
        with monkeypatch.context() as patched:
            # Not for the Trainer, which would form a process group.
            for name, value in (variables | identity | where | {"PERDURE_GENERATION": str(generation)}).items():
                patched.setenv(name, value)
            memory = MemoryCheckpoints(every=1)
        arguments = TrainingArguments(
            str(tmp_path / "out"), max_steps=steps, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
        )
        data = cast("Any", [{"inputs": torch.ones(2)}] * 64)
        torch.manual_seed(1)
        trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[memory])
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        found = memory.resume(trainer)
        trainer.train(resume_from_checkpoint=found)
        memory._checkpointer.flush()
        return trainer, found

    first, found = trained(1, 4)
    assert found is None
    scale = first.accelerator.scaler.get_scale()
    assert scale > 8.0
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where["PERDURE_STORE"] = f"127.0.0.1:{store.port}"
    again, found = trained(2, 4)
    assert found is not None
    assert again.accelerator.scaler.get_scale() == scale


class Killed(Exception):
    pass


def evaluated(
    folder: Path, world: World, *, first: bool, evaluate: str, killed_at: tuple[str, int] | None = None
) -> dict[str, Any]:
    """Trains for three epochs of four steps, from what is in memory; returns what the callbacks have then.

    Args:
        folder: Where the Trainer stores its checkpoints.
        world: The rank.
        first: Whether `MemoryCheckpoints` is the first of the callbacks, or the last.
        evaluate: What is followed by an evaluation: "steps" or "epoch".
        killed_at: The event at which the training ends, and the steps that are made by then.
    """
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from perdure_training.checkpoint.hugging_face import MemoryCheckpoints

    class Counts(TrainerCallback, ExportableState):
        def __init__(self) -> None:
            self.steps = self.epochs = self.evaluations = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.epochs += 1

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            self.evaluations += 1

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": dict(vars(self))}

    class Kills(TrainerCallback):
        pass

    def kill(self: Any, arguments: Any, state: Any, *_: Any, **__: Any) -> None:
        if killed_at is not None and state.global_step == killed_at[1]:
            memory._checkpointer.flush()
            raise Killed

    if killed_at is not None:
        setattr(Kills, killed_at[0], kill)
    # No evaluation is better than the one before by so much.
    stopping = EarlyStoppingCallback(early_stopping_patience=100, early_stopping_threshold=100.0)
    with pytest.MonkeyPatch.context() as outside:
        world.next_generation()
        memory = MemoryCheckpoints(every=1)
        # Not for the Trainer, which would form a process group.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            outside.delenv(name)
        arguments = TrainingArguments(
            str(folder),
            num_train_epochs=3,
            save_strategy="no",
            eval_strategy=evaluate,
            eval_steps=3,
            metric_for_best_model="loss",
            prediction_loss_only=True,
            restore_callback_states_from_checkpoint=True,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        data = cast("Any", [{"inputs": torch.ones(2) * number, "labels": torch.zeros(1)} for number in range(32)])
        callbacks: list[Any] = [stopping, Counts(), Kills()]
        callbacks.insert(0 if first else 3, memory)
        torch.manual_seed(1)
        trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)
        with suppress(Killed):
            trainer.train(resume_from_checkpoint=memory.resume(trainer))
    found = {type(one).__name__: one for one in trainer.callback_handler.callbacks}
    return {
        "model": {name: value.clone() for name, value in cast("nn.Module", trainer.model).state_dict().items()},
        "waited": found["EarlyStoppingCallback"].early_stopping_patience_counter,
        "counts": dict(vars(found["Counts"])),
        "best": trainer.state.best_metric,
        "step": trainer.state.global_step,
    }


@pytest.mark.parametrize(
    ("first", "evaluate", "killed_at"),
    [
        (True, "steps", [("on_step_begin", 2), ("on_evaluate", 3), ("on_step_begin", 3), ("on_epoch_begin", 8)]),
        (False, "epoch", [("on_step_end", 3), ("on_evaluate", 4), ("on_step_begin", 4), ("on_epoch_end", 8)]),
    ],
    ids=["first-of-all", "last-of-all"],
)
def test_callbacks_continue_wherever_a_training_was_killed(
    world: World, tmp_path: Path, first: bool, evaluate: str, killed_at: list[tuple[str, int]]
):
    expected = evaluated(tmp_path / "out", world, first=first, evaluate=evaluate)
    shutil.rmtree(world.folder)
    for killed in killed_at:
        stopped = evaluated(tmp_path / "out", world, first=first, evaluate=evaluate, killed_at=killed)
        assert stopped["step"] == killed[1]
    found = evaluated(tmp_path / "out", world, first=first, evaluate=evaluate)
    assert expected["waited"] > 1
    torch.testing.assert_close(found.pop("model"), expected.pop("model"), rtol=0, atol=0)
    assert found == expected
