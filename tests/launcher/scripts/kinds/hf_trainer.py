"""Hugging Face's Trainer with a tiny Llama of random weights; saves once, and resumes from there."""

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

folder = Path(os.environ["TEST_STEPS_DIR"]) / "trainer"
folder.mkdir(exist_ok=True)
checkpoint = get_last_checkpoint(str(folder))


class SaveOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step == 2 and checkpoint is None

    def on_train_begin(self, args, state, control, **_):
        if state.global_step:
            print("resumes from what was saved", flush=True)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        tokens = torch.full((8,), index % 16)
        return {"input_ids": tokens, "labels": tokens}


config = LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
arguments = TrainingArguments(
    output_dir=str(folder),
    use_cpu=True,
    max_steps=100_000,
    per_device_train_batch_size=2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    ignore_data_skip=True,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens(), callbacks=[SaveOnce()])
trainer.train(resume_from_checkpoint=checkpoint)
