"""A training that a test can break, or end with a file: real ranks over gloo, or over NCCL on one GPU, and a line on
disk for every step."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.launcher.scripts.descent import Descent

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--pause", type=float, default=0.02, help="seconds after each step")
parser.add_argument("--fail-at", type=int, help="raise at this step, every time")
parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a collective waits")
parser.add_argument("--hang-in", type=int, help="the generation in which rank 1 hangs before its first step")
parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
parser.add_argument(
    "--fault", choices=["loop", "lock", "mismatch", "size", "skip"], help="how a rank hangs at step 40, once"
)
parser.add_argument("--faulty-rank", type=int, default=1)
parser.add_argument("--alone", action="store_true", help="without a process group")
parser.add_argument("--evaluate", choices=["all", "first"], help="the ranks that pause for seconds, every 40 steps")
parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
parser.add_argument("--linger", type=float, default=0.0, help="seconds that the last rank needs for its final save")
options = parser.parse_args()


def fail_to_come() -> None:
    """Hangs in the chosen way, where no timeout ends it."""
    match options.fault:
        case "loop":
            while True:
                pass
        case "lock":
            threading.Event().wait()
        case "mismatch":
            dist.barrier()
        case "size":
            reduce(torch.zeros(8, device=device))


def reduce(tensor: torch.Tensor, group: Any = None) -> None:
    if not options.alone:
        dist.all_reduce(tensor, group=group)


def evaluate() -> None:
    """Takes much longer than a step."""
    time.sleep(10)


if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
torch.set_num_threads(1)
if options.hang_in == int(os.environ.get("PERDURE_GENERATION", "0")) and os.environ["RANK"] == "1":
    threading.Event().wait()
device = torch.device("cuda" if options.backend == "nccl" else "cpu")
# NCCL refuses two ranks of one machine on one GPU.
os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
if not options.alone:
    dist.init_process_group(options.backend, timeout=timedelta(seconds=options.timeout))
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
generation = int(os.environ.get("PERDURE_GENERATION", "0"))
# Where a collective is skipped, it is the only one of a group.
flags = dist.new_group() if options.fault == "skip" else None
model = nn.Linear(16, 16).to(device)
optimizer = Descent(model.parameters(), lr=0.01)
checkpoint = options.out / "checkpoint.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True, map_location=device)
    model.load_state_dict(saved["model"])
    step = saved["step"]
over = torch.zeros(1, device=device)
with (options.out / "steps").open("a", buffering=1) as log:
    while step < options.steps and not over.item():
        fails = bool(options.fault) and step == 40 and rank == options.faulty_rank and generation == 1
        if fails:
            fail_to_come()
        if options.evaluate and step % 40 == 39 and (rank == 0 or options.evaluate == "all"):
            evaluate()
        over.fill_(float((options.out / "finish").exists()))
        if not (fails and options.fault == "skip"):
            reduce(over, flags)
        model(torch.randn(4, 16, device=device)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            reduce(parameter.grad)
        optimizer.step()
        step += 1
        log.write(f"{time.time():.3f} {step} {rank} {world_size} {generation} {os.getpid()}\n")
        if step == options.fail_at:
            sys.exit(f"failing at step {step} as told")
        if rank == 0 and step % 10 == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save({"model": model.state_dict(), "step": step}, partial)
            os.replace(partial, checkpoint)
        time.sleep(options.pause)
    if rank == world_size - 1 and options.linger:
        (options.out / f"lingering-{generation}").touch()
        time.sleep(options.linger)
if not options.alone:
    dist.destroy_process_group()
