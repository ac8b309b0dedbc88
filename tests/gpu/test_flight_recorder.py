"""What a rank reads of NCCL's flight recorder, beside what the rank does with its GPU at the same time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BEGIN = """
import faulthandler, json, os, threading, time
faulthandler.dump_traceback_later(60, exit=True)
import torch
import torch.distributed as dist
from perdure_launcher.rank_plugins.collectives import positions
from perdure_launcher.rank_plugins.flight_recorder import read_collectives

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
numbers = torch.ones(1000, device="cuda")

def reduce():
    dist.all_reduce(numbers)

def tell(**found):
    print(json.dumps(found), flush=True)
    os._exit(0)

reduce()
torch.cuda.synchronize()
"""
CAPTURES = """
end, reads = threading.Event(), 0

def read():
    global reads
    while not end.wait(0.002):
        read_collectives()
        reads += 1

thread = threading.Thread(target=read)
thread.start()
captured = 0
for _ in range(10):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = numbers * 2
        before = reads
        while reads < before + 3:
            time.sleep(0.001)
        doubled += 1
    graph.replay()
    torch.cuda.synchronize()
    captured += bool((doubled == numbers * 2 + 1).all())
    # The device has not ended this one when the next graph is captured.
    torch.cuda._sleep(1 << 26)
    reduce()
end.set()
thread.join()
tell(captured=captured, reads=reads)
"""
CAPTURED = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    reduce()
    read_collectives()
graph.replay()
torch.cuda.synchronize()
reduce()
torch.cuda.synchronize()
(position,) = positions(read_collectives()).groups
tell(ended=position.ended, name=position.name)
"""
COSTS = """
def microseconds():
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(4000):
        reduce()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / 4000 * 1e6

called = [microseconds() for _ in range(6)][1:]
time.sleep(0.5)
begun = time.perf_counter()
count = len(read_collectives())
tell(called=min(called), read=1000 * (time.perf_counter() - begun), count=count, timed=read_collectives()[-1].seconds)
"""


def told(program: str, **environment: str) -> dict[str, Any]:
    """What a rank tells that runs the program."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + program], env=known, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_reading_ends_no_capture_of_a_graph(figures: dict[str, Any]) -> None:
    found = told(CAPTURES)
    assert found["captured"] == 10
    figures["readings beside ten captures of graphs"] = found["reads"]


def test_a_collective_of_a_graph_is_no_wait() -> None:
    assert told(CAPTURED) == {"ended": True, "name": "nccl:all_reduce"}


@pytest.mark.parametrize("timed", [False, True])
def test_what_reading_and_timing_cost(figures: dict[str, Any], timed: bool) -> None:
    found = told(COSTS, **({"TORCH_NCCL_ENABLE_TIMING": "1"} if timed else {}))
    assert found["count"] == 2000
    assert (found["timed"] is not None) is timed
    name = "timed" if timed else "not timed"
    figures[f"a collective that is {name}"] = f"{found['called']:.1f} µs"
    figures[f"reading 2,000 collectives that are {name}"] = f"{found['read']:.0f} ms"
