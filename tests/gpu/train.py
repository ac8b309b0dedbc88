"""A training on a GPU whose every step is determined by the one before: it writes down a digest of each.

Its state has what a real one has on a GPU: parameters in bfloat16 and float32, optimizers with fused and with foreach
kernels, integers, a transposed tensor, and the generator of the GPU's random numbers, which dropout draws from.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perdure_training import report
from perdure_training.checkpoint import Checkpointer, Generators

BALLAST = 4 << 30
"""Bytes that each rank holds on the GPU, so that the memory of a rank that is gone can be told from noise."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a state dict, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in tensors_in(one)]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def digest(state: dict[str, Any]) -> str:
    """A digest of the bits of all tensors of a state, with their types and devices."""
    found = hashlib.sha256()
    for name, value in state.items():
        for tensor in tensors_in(value.state_dict() if hasattr(value, "state_dict") else value):
            found.update(f"{name} {tensor.dtype} {tensor.device} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pause", type=float, default=0.03)
    options = parser.parse_args()
    started = time.time()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    ballast = torch.empty(BALLAST, dtype=torch.uint8, device=device)

    torch.manual_seed(7)
    narrow = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)).to(device, torch.bfloat16)
    wide = nn.Linear(256, 256, device=device)
    torch.manual_seed(7 + rank)
    state: dict[str, Any] = {
        "narrow": narrow,
        "wide": wide,
        "fused": torch.optim.AdamW(wide.parameters(), lr=1e-3, fused=True),
        "foreach": torch.optim.AdamW(narrow.parameters(), lr=1e-3, foreach=True),
        "counts": torch.zeros(256, dtype=torch.int8, device=device),
        "transposed": torch.zeros(64, 32, device=device).t(),
        "generators": Generators(),
        "step": 0,
    }
    checkpointer = Checkpointer(every=1)
    restored = checkpointer.restore(state)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / f"steps-{rank}").open("a", buffering=1) as log:

        def write(kind: str) -> None:
            generation = os.environ.get("PERDURE_GENERATION", "0")
            log.write(f"{kind} {state['step']} {digest(state)} {generation} {os.getpid()} {started} {time.time()}\n")

        if restored is not None:
            write("restored")
        while state["step"] < options.steps:
            batch = torch.randn(64, 256, device=device)
            loss = wide(narrow(batch.bfloat16()).float()).square().mean()
            loss.backward()
            for name in ("narrow", "wide"):
                for parameter in state[name].parameters():
                    dist.all_reduce(parameter.grad)
            for name in ("fused", "foreach"):
                state[name].step()
                state[name].zero_grad()
            state["counts"] += 1
            state["transposed"] += torch.rand(32, 64, device=device)
            state["step"] += 1
            write("made")
            checkpointer.save(state["step"], state)
            report(step=state["step"], total=options.steps)
            time.sleep(options.pause)
    (options.out / f"ended-{rank}").write_text(digest(state))
    del ballast
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
