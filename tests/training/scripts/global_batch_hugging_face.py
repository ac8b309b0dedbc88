"""Trains 12 steps of 7 samples with Hugging Face's Trainer, and saves the parameters: global_batch_hugging_face.py KIND
MICRO_BATCH OUT [STEPS], of a kind "means" or "tokens" of losses; it resumes what an earlier call has left."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from perdure_training.elastic.hugging_face import GlobalBatchCallback

SAMPLES, STEPS = 7, 12


class Means(nn.Module):
    """Its loss is the mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": functional.cross_entropy(self.layers(inputs).transpose(1, 2), labels)}


class Tokens(Means):
    """Its loss is the mean over tokens, of which samples have different numbers."""

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        how = "mean" if num_items_in_batch is None else "sum"
        loss = functional.cross_entropy(self.layers(inputs).transpose(1, 2), labels, reduction=how)
        return {"loss": loss if num_items_in_batch is None else loss / num_items_in_batch}


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source = torch.Generator().manual_seed(index)
        labels = torch.randint(5, (6,), generator=source)
        if kind == "tokens":
            labels[1 + index % 5 :] = -100
        return {"inputs": torch.randn(6, 8, dtype=torch.float64, generator=source), "labels": labels}


kind, micro_batch, out, *steps = sys.argv[1:]
torch.manual_seed(0)
model = (Means() if kind == "means" else Tokens()).double()
folder = Path(out).with_suffix("")
arguments = TrainingArguments(
    output_dir=str(folder),
    use_cpu=True,
    max_steps=STEPS,
    learning_rate=0.05,
    weight_decay=0.0,
    lr_scheduler_type="linear",
    save_steps=5,
    report_to=[],
    disable_tqdm=True,
    ddp_find_unused_parameters=False,
    remove_unused_columns=False,
)
batch = GlobalBatchCallback(SAMPLES, micro_batch=int(micro_batch))
trainer = Trainer(model, arguments, train_dataset=Samples(), callbacks=[batch])
batch.prepare(trainer)
if steps:
    arguments.max_steps = STEPS  # The schedule is that of the whole training.
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == int(steps[0])

    trainer.add_callback(Stop())
left = get_last_checkpoint(str(folder)) if folder.exists() else None
trainer.train(resume_from_checkpoint=left)
if int(os.environ["RANK"]) == 0:
    torch.save({name: value.detach() for name, value in model.named_parameters()}, out)
    print(f"ended at {trainer.state.global_step}, from {left}", flush=True)
