"""Measures what splitting steps costs the ranks: two ranks train over gloo, and every second block of steps is timed.

python -m benchmarks.step_times [--minutes 2]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

_BLOCK = 2.0
"""Seconds of steps with hooks, or without: ranks choose the number of steps in the first block."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    options = parser.parse_args()
    if "RANK" in os.environ:
        _train(options.minutes * 60)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PERDURE_RUN_ID": "bench",
            "PERDURE_GENERATION": "1",
            "PERDURE_PROGRESS_DIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--rdzv-id",
            "bench",
        ]
        module = ["-m", "benchmarks.step_times", "--minutes", str(options.minutes)]
        subprocess.run([*command, *module], env=environment, check=True)


def _train(seconds: float) -> None:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from perdure_launcher.rank_plugins.step_counter import StepCounter
    from perdure_launcher.rank_plugins.step_times import StepTimer
    from perdure_training.node_api.progress_file import progress_path, read_progress

    StepCounter().install()
    timer = StepTimer()
    timer.install()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spent = 0.0

    def step() -> None:
        model(torch.randn(32, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    read = timer._read

    def timed() -> None:
        nonlocal spent
        began = time.thread_time()
        read()
        spent += time.thread_time() - began

    timer._read = timed
    for _ in range(20):
        step()
    began = time.perf_counter()
    for _ in range(20):
        step()
    count = torch.tensor([_BLOCK * 20 / (time.perf_counter() - began)])
    distributed.all_reduce(count, distributed.ReduceOp.MIN)
    steps, blocks = int(count.item()), {True: list[float](), False: list[float]()}
    spent, started = 0.0, time.perf_counter()
    for block in range(round(seconds / _BLOCK)):
        on = block % 2 == 0
        timer._stopped = not on
        block_began = time.perf_counter()
        for _ in range(steps):
            step()
        blocks[on].append((time.perf_counter() - block_began) / steps)
    elapsed = time.perf_counter() - started
    if rank == 0:
        pairs = [on / off - 1 for on, off in zip(blocks[True], blocks[False], strict=False)]
        progress = read_progress(progress_path(Path(os.environ["PERDURE_PROGRESS_DIR"]), rank))
        result = {
            "step_ms": round(1e3 * mean(blocks[False]), 3),
            "overhead_pct": round(100 * median(pairs), 2),
            "readings": timer._readings,
            "readings_cpu_pct": round(100 * spent / (elapsed / 2), 3),
            "split": progress.step_times if progress else None,
        }
        print(json.dumps(result))


main()
