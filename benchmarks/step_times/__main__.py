"""Measures what splitting steps costs the ranks: two ranks train over gloo, and every second block of steps is split.

python -m benchmarks.step_times [--minutes 2]

A reading of the recorder falls into few blocks, so its time is measured by itself: `evidence_overhead_pct` is the
median over pairs of blocks, which is what hooks cost, and the share of the time that readings take. Blocks are in the
order with, without, without, with, so that a machine that becomes slower or faster favours neither.

Other work of the machine changes how long a step takes by more than hooks do, and hardly how long it computes. So the
processor time of the rank's main thread, in which hooks and readings run, is compared, too: `cpu` has the microseconds
of a step that hooks take, the interval that holds them in 95 of 100 cases, and the shares that hooks and readings take
together of steps of 0.1 and 1 s, with the same interval.
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
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

_BLOCK = 0.5
"""Seconds of steps with hooks, or without: ranks choose the number of steps in the first block."""
_STEPS = (0.1, 1.0)
"""Seconds of a step of which the cost is told as a share."""
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
    hooks = TimedHooks(lambda: not timer._stopped)
    timer.on_begin, timer.on_end = hooks.timed(timer.on_begin), hooks.timed(timer.on_end)
    timer.install()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spent = spent_of_processor = 0.0

    def step() -> None:
        model(torch.randn(32, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    read = timer._read

    def timed() -> None:
        nonlocal spent, spent_of_processor
        began, used = time.perf_counter(), time.thread_time()
        read()
        spent += time.perf_counter() - began
        spent_of_processor += time.thread_time() - used

    timer._read = timed
    for _ in range(20):
        step()
    began = time.perf_counter()
    for _ in range(20):
        step()
    count = torch.tensor([_BLOCK * 20 / (time.perf_counter() - began)])
    distributed.all_reduce(count, distributed.ReduceOp.MIN)
    steps, blocks = int(count.item()), {True: list[float](), False: list[float]()}
    computed = {True: list[float](), False: list[float]()}
    spent, spent_of_processor, started = 0.0, 0.0, time.perf_counter()
    for block in range(round(seconds / _BLOCK)):
        on = block % 4 in (0, 3)
        timer._stopped = not on
        block_began, used, read_before = time.perf_counter(), time.thread_time(), spent_of_processor
        for _ in range(steps):
            step()
        blocks[on].append((time.perf_counter() - block_began) / steps)
        computed[on].append((time.thread_time() - used - (spent_of_processor - read_before)) / steps)
    elapsed = time.perf_counter() - started
    if rank == 0:
        pairs = [on / off - 1 for on, off in zip(blocks[True], blocks[False], strict=False)]
        progress = read_progress(progress_path(Path(os.environ["PERDURE_PROGRESS_DIR"]), rank))
        assert progress is not None
        assert progress.step_times is not None
        within = [100 * edge for edge in _interval(pairs)]
        # Readings keep their distance in time, in which blocks without hooks pass, too.
        cost, readings = 100 * median(pairs), 100 * spent / elapsed
        result = {
            "step_ms": round(1e3 * mean(blocks[False]), 3),
            "hooks_pct": round(cost, 2),
            "hooks_pct_within": [round(edge, 2) for edge in within],
            "readings_pct": round(readings, 2),
            "readings": timer._readings,
            "split_ms": [round(1e3 * part, 3) for part in progress.step_times[:3]],
            "hooks_us": hooks.usual_us,
            "cpu": _processor_time(computed, 100 * spent_of_processor / elapsed),
            "evidence_overhead_pct": round(cost + readings, 2),
        }
        print(json.dumps(result))


class TimedHooks:
    """How long the hooks take themselves, with the clock that tells it."""

    def __init__(self, counts: Callable[[], bool]) -> None:
        self._counts = counts
        """Whether a call counts: hooks are switched off in every second block."""
        self._nanoseconds: list[list[int]] = []

    def timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        taken: list[int] = []
        self._nanoseconds.append(taken)

        def measured(*args: Any) -> None:
            began = time.perf_counter_ns()
            hook(*args)
            if self._counts():
                taken.append(time.perf_counter_ns() - began)

        return measured

    @property
    def usual_us(self) -> float:
        """Microseconds of a step in which both are called: medians, so that a reading changes nothing."""
        return round(sum(median(taken) for taken in self._nanoseconds) / 1e3, 2)


def _processor_time(computed: dict[bool, list[float]], readings: float) -> dict[str, object]:
    """What hooks take of a processor.

    Args:
        computed: Seconds of processor time of a step in each block, with hooks and without.
        readings: The share of the time that readings take, in percent.
    """
    pairs = [on - off for on, off in zip(computed[True], computed[False], strict=False)]
    hooks, within = median(pairs), _interval(pairs)
    most = {f"{step:g}": [round(100 * seconds / step + readings, 4) for seconds in (hooks, *within)] for step in _STEPS}
    return {
        "step_ms": round(1e3 * mean(computed[False]), 3),
        "readings_pct": round(readings, 4),
        "hooks_us": round(1e6 * hooks, 2),
        "hooks_us_within": [round(1e6 * edge, 2) for edge in within],
        "overhead_pct_of_a_step_of_s": most,
    }


def _interval(pairs: list[float]) -> tuple[float, float]:
    """The interval that holds the median in 95 of 100 cases, by drawing the pairs again."""
    drawn = sorted(median(random.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLED))
    low, high = (drawn[round(share * (_RESAMPLED - 1))] for share in (0.025, 0.975))
    return low, high


main()
