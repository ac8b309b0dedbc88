"""A training of states that are each kept in another way: `replicated`, the same on all ranks, and `split`, by FSDP2.
Rank 0 writes down what each restores, and each step.

A step begins once the snapshots of the one before are on other nodes, as far as these take them.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from perdure_training import report
from perdure_training.checkpoint import Checkpointer

PAUSE = 0.1
SIZE = 128


def model_of(kind: str) -> nn.Module:
    model = nn.Linear(SIZE, SIZE)
    if kind != "replicated":
        fully_shard(model)
    return model


def fill(model: nn.Module, step: int) -> None:
    """Gives all parameters the value of the step."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)


def check(model: nn.Module, step: int) -> None:
    """Verifies that the parameters have the value of the step."""
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert whole.unique().tolist() == [step], f"step {step}: {whole.unique().tolist()}"


class WithCheckpointer:
    """A state that a Checkpointer keeps."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self._checkpointer = Checkpointer(every=1, replicated=kind == "replicated", name=kind)
        self._state: dict[str, Any] = {"model": model, "step": 0}
        self.restored = self._checkpointer.restore(self._state)

    def save(self, step: int) -> None:
        self._state["step"] = step
        self._checkpointer.save(step, self._state)
        self._checkpointer.flush()


out, *kinds = Path(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world_size, generation = dist.get_rank(), dist.get_world_size(), int(os.environ["PERDURE_GENERATION"])
models = {kind: model_of(kind) for kind in kinds}
while not (out / "go").exists():
    time.sleep(0.05)
kept = {kind: WithCheckpointer(kind, model) for kind, model in models.items()}
for kind, one in kept.items():
    if one.restored is not None:
        check(models[kind], one.restored)
steps = {kind: one.restored or 0 for kind, one in kept.items()}
with (out / "made").open("a", buffering=1) as log:

    def tell(what: str) -> None:
        if rank == 0:
            log.write(
                f"{what} {generation} {world_size} {' '.join(f'{kind}={step}' for kind, step in steps.items())}\n"
            )

    tell("restored")
    while True:
        for kind, model in models.items():
            steps[kind] += 1
            fill(model, steps[kind])
        dist.barrier()
        report(step=max(steps.values()))
        tell("made")
        for kind, one in kept.items():
            one.save(steps[kind])
        time.sleep(PAUSE)
