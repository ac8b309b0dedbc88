"""Hugging Face's Trainer as its tutorials use it: a tiny Llama of random weights, resumed from its last checkpoint."""

import os
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

PACE = float(os.environ.get("STEP_SECONDS", "0.05"))
"""Seconds of sleep per step, which simulate the compute of a larger model."""


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = (torch.arange(8) + index) % 16
        return {"input_ids": tokens, "labels": tokens}


class Compute(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        time.sleep(PACE)


def main(out: Path, epochs: int) -> None:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        save_strategy="epoch",
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens(), callbacks=[Compute()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)))
    trainer.save_model(str(out / "final"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
