"""Tests of how the steps of ranks are split: by value, and in real ranks over gloo of which one computes longer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure_launcher.environment import inject
from perdure_launcher.rank_plugins.step_times import OptimizerStep, split_steps
from perdure_training.node_api.progress_file import StepTimes, progress_path, read_progress

MS = 10**6

# Milliseconds from the end of a step to the collectives and the optimizer of the next; what is computed and waited.
PROGRAMS = {
    "one collective": ([20], 26, (20, 6)),
    "a slow rank waits for nobody": ([25], 26, (25, 1)),
    "waits longer than it computes": ([20], 90, (20, 70)),
    "buckets of DistributedDataParallel": ([20, 22, 24], 30, (20, 10)),
    "the mean of the losses is taken after each step": ([1, 21, 23, 25], 30, (20, 9)),
    "one collective for each parameter": ([20, 26, 27, 28], 30, (20, 10)),
    "gradients are accumulated, with collectives each time": ([20, 22, 50, 52], 60, (20, 40)),
    "a collective before the optimizer": ([20, 29], 30, (20, 10)),
}


def steps_of(calls: Sequence[float], began: float, count: int = 10) -> tuple[list[OptimizerStep], list[int]]:
    """Equal steps one after another, in which the optimizer takes 2 ms."""
    ends = [at * (began + 2) for at in range(count)]
    optimizer = [OptimizerStep(int((end - 2) * MS), int(end * MS)) for end in ends]
    return optimizer, [int((end + call) * MS) for end in ends[:-1] for call in calls]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_is_split_at_its_first_collective(name: str) -> None:
    calls, began, (compute, wait) = PROGRAMS[name]
    split = split_steps(*steps_of(calls, began))
    assert split == pytest.approx((compute / 1e3, wait / 1e3, (began + 2 - compute - wait) / 1e3))


def test_a_pause_for_an_evaluation_changes_nothing() -> None:
    steps, calls = steps_of([20], 26)
    later = [OptimizerStep(step.began + 10**11, step.ended + 10**11) for step in steps[5:]]
    moved = [call + 10**11 if call >= steps[4].ended else call for call in calls]
    assert split_steps([*steps[:5], *later], moved) == split_steps(steps, calls)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_too_little_is_no_split(kept: int) -> None:
    steps, calls = steps_of([20], 26)
    assert split_steps(steps, []) is None
    assert split_steps(steps[:kept], calls[:1]) is None


def test_several_optimizers_that_step_one_after_another_are_one_step() -> None:
    steps, calls = steps_of([20], 26)
    halves = [OptimizerStep(step.began + part * MS, step.began + (part + 1) * MS) for step in steps for part in (0, 1)]
    # The second half is not known to be an optimizer's only step.
    assert split_steps(halves, calls) == pytest.approx((0.021, 0.006, 0.001))


@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=6), st.floats(0.5, 50), st.integers(3, 30))
def test_the_parts_are_a_step(gaps: list[float], last: float, count: int) -> None:
    calls = [sum(gaps[: end + 1]) for end in range(len(gaps))]
    steps, made = steps_of(calls, calls[-1] + last, count)
    split = split_steps(steps, made)
    assert split is not None
    assert sum(split) == pytest.approx(calls[-1] / 1e3 + last / 1e3 + 0.002, abs=1e-6)
    assert all(part >= 0 for part in split)


RANK = """
import os, pathlib, time, torch
from torch import distributed
from perdure_training.node_api.progress_file import progress_path, read_progress
torch.set_num_threads(1)
distributed.init_process_group("gloo")
rank = distributed.get_rank()
parameter = torch.nn.Parameter(torch.zeros(1000)); parameter.grad = torch.ones(1000)
optimizer = torch.optim.SGD([parameter], lr=0.1)
path = progress_path(pathlib.Path(os.environ["PERDURE_PROGRESS_DIR"]), rank)
missing = torch.ones(1)
while missing:
    time.sleep(0.06 if rank else 0.03)
    distributed.all_reduce(parameter.grad)
    optimizer.step()
    progress = read_progress(path)
    missing = torch.tensor([float(progress is None or progress.step_times is None)])
    distributed.all_reduce(missing)
distributed.destroy_process_group()
"""


def test_the_rank_that_computes_longer_is_seen_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "PYTHONPATH": str(inject(tmp_path)),
        "PERDURE_RUN_ID": "abc",
        "TORCHELASTIC_RUN_ID": "abc",
        "PERDURE_GENERATION": "2",
        "PERDURE_PROGRESS_DIR": str(tmp_path / "progress"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env={**common, "RANK": str(rank)}, cwd=tmp_path)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    fast, slow = (step_times_of(tmp_path / "progress", rank) for rank in range(2))
    assert 0.03 <= fast.compute < 0.06 <= slow.compute
    assert slow.wait < fast.wait


def step_times_of(folder: Path, rank: int) -> StepTimes:
    progress = read_progress(progress_path(folder, rank))
    assert progress is not None
    assert progress.step_times is not None
    assert progress.step_times.known
    return progress.step_times
