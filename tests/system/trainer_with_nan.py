"""A training of Hugging Face's Trainer whose loss on one rank is once not a number: real ranks, with snapshots."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from perdure_training.checkpoint.hugging_face import MemoryCheckpoints


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"numbers": torch.rand(16, generator=torch.Generator().manual_seed(index))}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(numbers) - numbers).square().mean()}


class Spoiled(Trainer):
    """Spoils a loss, the first time that its step is made."""

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **options: Any) -> Any:
        loss: Any = super().compute_loss(model, inputs, *others, **options)
        if self.args.process_index == 1 and self.state.global_step + 1 == spoil_at and not spoiled.exists():
            spoiled.touch()
            return loss * math.nan
        return loss


class StepLog(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with (out / f"steps-{args.process_index}").open("a") as log:
            log.write(f"{time.time():.3f} {state.global_step} {args.world_size}\n")
        time.sleep(0.05)


parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--spoil-at", type=int, default=20)
options = parser.parse_args()
out, spoil_at = options.out, options.spoil_at
spoiled = out / "spoiled"
torch.set_num_threads(1)
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(out / "trainer"),
    max_steps=options.steps,
    per_device_train_batch_size=4,
    use_cpu=True,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=1,
    logging_nan_inf_filter=False,
)
memory = MemoryCheckpoints(every=1)
trainer = Spoiled(Model(), arguments, train_dataset=Numbers(), callbacks=[StepLog(), memory])
trainer.train(resume_from_checkpoint=memory.resume(trainer))
