"""The demo's training, in which rank 1 dies once: its gradients are in the step that rank 0 then saves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from examples.demo import train
from examples.demo.steps import read_steps

DIES_AT = 20

out = Path(os.environ["OUT"])
made = torch.optim.AdamW.step
died = out / "died"


def step(self: torch.optim.AdamW, closure: None = None) -> None:
    made(self)
    state = next(iter(self.state.values()))
    if os.environ["RANK"] == "1" and int(state["step"]) == DIES_AT and not died.exists():
        # Rank 0 writes this down after it has saved the step.
        while not any(one.number == DIES_AT for one in read_steps(out)):
            time.sleep(0.01)
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


torch.optim.AdamW.step = step
train.main()
