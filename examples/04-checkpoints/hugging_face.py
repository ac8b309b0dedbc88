"""Trains a tiny language model with Hugging Face's Trainer, and keeps every step in memory.

    perdure run --nodes 2 -- torchrun hugging_face.py --steps 200

It runs the same without Perdure, where it keeps nothing in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from perdure_training.checkpoint.hugging_face import MemoryCheckpoints


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same for an index each time."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class StepLog(TrainerCallback):
    """Writes down each step that is made, and has it take its time."""

    def __init__(self, path: Path, pause: float) -> None:
        self._file = path.open("a", buffering=1)
        self._pause = pause

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._file.write(f"{time.time():.3f} {state.global_step} {args.world_size}\n")
        time.sleep(self._pause)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a tiny language model, and keeps every step in memory.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            # So that a restored generator of random numbers makes a difference.
            attention_dropout=0.1,
        )
    )
    memory = MemoryCheckpoints(every=1)
    log = StepLog(options.out / f"steps-{arguments.process_index}", options.pause)
    trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=[log, memory])
    trainer.train(resume_from_checkpoint=memory.resume(trainer))
    if arguments.process_index == 0:
        parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        (options.out / "digest").write_text(hashlib.sha256(parameters).hexdigest())


if __name__ == "__main__":
    main()
