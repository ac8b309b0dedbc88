"""Ranks that check their steps, some of them with a device that computes wrongly: real flips of single bits."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure_training.node_api.replay_files import write_request
from perdure_training.numbers import watch
from perdure_training.replay import Replay

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("faults", nargs="+")
options = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
os.environ["PERDURE_RUN_ID"] = os.environ["TORCHELASTIC_RUN_ID"]
STEPS, EVERY, FAULT_AT, ODD = 12, 2, 6, 1


def flip(tensor: torch.Tensor) -> torch.Tensor:
    """Flips one bit of the first element."""
    flipped = tensor.detach().clone()
    flipped.view(-1).view(torch.int32)[0] ^= 1 << 12
    return flipped


def is_faulty(fault: str, step: int, call: int) -> bool:
    """Whether this rank's computation of a step goes wrong, the first of the step or a later one."""
    if fault == "passing":
        return rank == ODD and step == FAULT_AT and call == 1
    if fault == "lasting":
        return rank == ODD and step >= FAULT_AT
    if fault in ("lasting-from-the-start", "requested-lasting"):
        return rank == ODD
    if fault == "flaky":
        return rank == ODD and step == FAULT_AT and call in (1, 4, 7)
    if fault == "other-kernels":
        # As cuDNN's benchmark, which measures several and takes the fastest, on each rank for itself.
        return rank == ODD and torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()
    if fault == "random":
        return bool(torch.empty((), dtype=torch.int64).random_(generator=chance) % 2)
    return False


def train(fault: str, watched: bool) -> list[float]:
    """Trains a model; returns its parameters."""
    torch.manual_seed(0)
    first = nn.Linear(16, 32)
    layers = nn.Sequential(first, nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 4))
    model = DistributedDataParallel(layers)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = 0
    step = 0

    def compute(inputs: torch.Tensor, targets: dict[str, torch.Tensor]) -> float:
        nonlocal calls
        calls += 1
        outputs = model(inputs)
        if is_faulty(fault, step, calls):
            outputs.register_hook(flip)
        loss = (outputs - targets["y"]).square().mean()
        loss.backward()
        return loss.item()

    def compute_and_step(*batch: Any) -> float:
        loss = compute(*batch)
        optimizer.step()
        return loss

    called = compute_and_step if fault == "changes-parameters" else compute
    replay: Callable[..., Any] = (
        Replay(model, called, every=1000 if fault.startswith("requested") else EVERY, max_overhead=1000.0)
        if watched
        else lambda _, *batch: compute(*batch)
    )
    batches = torch.Generator().manual_seed(100 + rank)
    for step in range(1, STEPS + 1):
        inputs, targets = torch.randn(8, 16, generator=batches), {"y": torch.randn(8, 4, generator=batches)}
        optimizer.zero_grad()
        calls = 0
        replay(step, inputs, targets)
        optimizer.step()
        if fault == "parameter" and rank == ODD and step == FAULT_AT - 1:
            with torch.no_grad():
                first.weight.copy_(flip(first.weight))
    return [float(one) for parameter in layers.state_dict().values() for one in parameter.double().flatten()]


chance = torch.Generator().manual_seed(rank)
for fault in options.faults:
    folder = options.out / fault
    os.environ["PERDURE_PROGRESS_DIR"] = str(folder)
    if fault == "requested" and rank == 0:
        write_request(options.out, 7, generation=0)
    watch.spoil("")
    torch.backends.cudnn.benchmark = fault == "other-kernels"
    try:
        result: Any = train(fault, watched=True)
    except RuntimeError as error:
        result = str(error)
    if fault == "none":
        assert result == train(fault, watched=False), "the training is another one when it is checked"
        result = ""
    assert torch.backends.cudnn.benchmark == (fault == "other-kernels"), "the script's choice is as it was"
    assert not torch.are_deterministic_algorithms_enabled()
    (options.out / f"{fault}-{rank}.json").write_text(
        json.dumps({"error": result if isinstance(result, str) else "", "spoiled": watch.spoiled_by})
    )
dist.destroy_process_group()
