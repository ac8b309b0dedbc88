"""Measures what splitting steps costs the ranks: two ranks train over gloo, and every second block of steps is split.

python -m benchmarks.step_times [--minutes 2]

A reading of the recorder falls into few blocks, so its time is measured by itself: `evidence_overhead_pct` is the
median over pairs of blocks, which is what hooks cost, and the share of the time that readings take. Blocks are in the
order with, without, without, with, so that a machine that becomes slower or faster favours neither.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

_BLOCK = 0.5
"""Seconds of steps with hooks, or without: ranks choose the number of steps in the first block."""
_RESAMPLED = 2000
"""How often the pairs are drawn again for the interval that holds the hooks' cost in 95 of 100 cases."""


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
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "127.0.0.1:0",
            # `--standalone` would choose another one, and ranks that are not of this run are not timed.
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
        began = time.perf_counter()
        read()
        spent += time.perf_counter() - began

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
        on = block % 4 in (0, 3)
        timer._stopped = not on
        block_began = time.perf_counter()
        for _ in range(steps):
            step()
        blocks[on].append((time.perf_counter() - block_began) / steps)
    elapsed = time.perf_counter() - started
    if rank == 0:
        pairs = [on / off - 1 for on, off in zip(blocks[True], blocks[False], strict=False)]
        progress = read_progress(progress_path(Path(os.environ["PERDURE_PROGRESS_DIR"]), rank))
        assert progress is not None
        assert progress.step_times is not None
        drawn = sorted(median(random.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLED))
        within = [100 * drawn[round(share * (_RESAMPLED - 1))] for share in (0.025, 0.975)]
        # Readings keep their distance in time, in which blocks without hooks pass, too.
        hooks, readings = 100 * median(pairs), 100 * spent / elapsed
        result = {
            "step_ms": round(1e3 * mean(blocks[False]), 3),
            "hooks_pct": round(hooks, 2),
            "hooks_pct_within": [round(edge, 2) for edge in within],
            "readings_pct": round(readings, 2),
            "readings": timer._readings,
            "split_ms": [round(1e3 * part, 3) for part in progress.step_times[:3]],
            "evidence_overhead_pct": round(hooks + readings, 2),
        }
        print(json.dumps(result))


main()
