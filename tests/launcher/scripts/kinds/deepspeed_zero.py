"""DeepSpeed without its launcher: ZeRO's second stage over gloo; saves once, and resumes from there."""

import os
from pathlib import Path

import deepspeed
import torch

# Compiled at first use, which takes longer than all the rest.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
folder = Path(os.environ["TEST_STEPS_DIR"]) / "zero"
model = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
saved = (folder / "latest").exists()
if saved:
    engine.load_checkpoint(str(folder))
    print("resumes from what was saved", flush=True)
while True:
    loss = torch.nn.functional.mse_loss(engine(torch.randn(4, 8)), torch.randn(4, 1))
    engine.backward(loss)
    engine.step()
    if engine.global_steps == 2 and not saved:
        engine.save_checkpoint(str(folder))
