"""A training that saves with torch.save into a folder of its node, as it did before there was Perdure."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("saves", type=Path)
options = parser.parse_args()

options.saves.mkdir(parents=True, exist_ok=True)
state: dict[str, Any] = {"step": 0, "weights": torch.zeros(1000)}
if files := sorted(options.saves.glob("step-*.pt")):
    state = torch.load(files[-1])
with (options.out / "steps").open("a", buffering=1) as log:
    while not (options.out / "finish").exists():
        time.sleep(0.02)
        state["step"] += 1
        state["weights"] += 1
        assert bool((state["weights"] == state["step"]).all())
        log.write(f"{time.time():.3f} {state['step']} 0 1 0 0\n")
        if state["step"] % 50 == 0:
            torch.save(state, options.saves / f"step-{state['step']:06}.pt")
            for file in sorted(options.saves.glob("step-*.pt"))[:-3]:
                file.unlink()
