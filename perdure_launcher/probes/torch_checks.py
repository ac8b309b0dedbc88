"""Measures with torch: every device of this machine, or the link to another one. A program of its own, in the
interpreter of the user's command; it prints each figure as a line of JSON.

    torch_checks.py                         multiplications of matrices, on each GPU, or on the processor
    torch_checks.py ADDRESS PLACE RANK      a collective with the machine at ADDRESS, which runs the same with the other
                                            rank; both meet at PLACE, host and port in the form of URLs

GPUs exchange by NCCL, where both machines have some, and processors by gloo.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

_SIZE = {"cuda": 8192, "cpu": 768}
_BEST_OF = 5
_EXCHANGED = 4 << 20
"""Numbers of four bytes in one collective."""
_SLOW = 0.5
"""Seconds of one such collective from which on it is not repeated: what takes so long is no chance of a moment, and the
other links wait to be measured."""
_WAIT = timedelta(seconds=30)
"""The time for the other machine to come."""


def main(arguments: list[str]) -> None:
    if arguments:
        address, place, rank = arguments
        _report("link", address, _exchange(place, int(rank)), "MB/s")
        return
    for device in _devices():
        _report("matmul", device, _multiply(device), "GFLOP/s")


def _devices() -> list[str]:
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]


def _multiply(device: str) -> float:
    size = _SIZE[torch.device(device).type]
    matrix = torch.ones(size, size, device=device)
    seconds = _fastest(lambda: matrix @ matrix, device)
    return 2 * size**3 / 1e9 / seconds


def _exchange(place: str, rank: int) -> float:
    device = "cuda:0" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu"
    dist.init_process_group(
        "nccl" if device != "cpu" else "gloo",
        init_method=f"tcp://{place}",
        rank=rank,
        world_size=2,
        timeout=_WAIT,
    )
    numbers = torch.ones(_EXCHANGED, device=device)
    # The first collective makes the connections.
    dist.all_reduce(numbers[: _EXCHANGED >> 6])
    seconds = _time(lambda: dist.all_reduce(numbers), device)
    longest = torch.tensor([seconds], device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    # Both ranks must go on, or none.
    if longest.item() < _SLOW:
        seconds = _fastest(lambda: dist.all_reduce(numbers), device)
    dist.destroy_process_group()
    return numbers.nbytes / 1e6 / seconds


def _fastest(work: Callable[[], object], device: str) -> float:
    """The fastest of a few tries; the first one, which prepares the device, does not count."""
    return min([_time(work, device) for _ in range(_BEST_OF + 1)][1:])


def _time(work: Callable[[], object], device: str) -> float:
    begun = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _report(name: str, subject: str, value: float, unit: str) -> None:
    sys.stdout.write(json.dumps({"name": name, "subject": subject, "value": value, "unit": unit}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
