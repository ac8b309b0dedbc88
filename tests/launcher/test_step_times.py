"""Tests of how the steps of ranks are split: by value, and in real ranks over gloo of which one computes longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure_launcher.environment import inject
from perdure_launcher.rank_plugins import step_times
from perdure_launcher.rank_plugins.flight_recorder import Collective, Recorded
from perdure_launcher.rank_plugins.step_times import (
    OptimizerStep,
    has_stages,
    split_device_steps,
    split_steps,
    usual_pace,
)
from perdure_training.node_api.progress_file import COUNTED, ProgressFile, StepTimes, progress_path, read_progress
from tests.support.ports import free_port

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


def device_steps(waits: Sequence[float], *, step: float = 30) -> tuple[list[OptimizerStep], list[Collective]]:
    """Steps of so many milliseconds, each with one collective that runs on the device for a time."""
    ends = [at * step for at in range(len(waits) + 1)]
    optimizer = [OptimizerStep(int((end - 1) * MS), int(end * MS)) for end in ends]
    calls = [
        Collective("0", at, "nccl:all_reduce", int((end - 5) * MS), ended=True, seconds=wait / 1e3)
        for at, (end, wait) in enumerate(zip(ends[1:], waits, strict=True))
    ]
    return optimizer, calls


def test_a_device_waits_while_its_collectives_run() -> None:
    assert split_device_steps(*device_steps([6] * 10)) == pytest.approx((0.024, 0.006, 0))
    # The process may call the collectives of many steps at once, and then waits for the device.
    steps, calls = device_steps([6] * 10)
    ahead = [*steps[:2], *(OptimizerStep(one.began, one.ended - MS) for one in steps[2:9]), *steps[9:]]
    assert split_device_steps(ahead, calls) == pytest.approx((0.024, 0.006, 0))


def test_collectives_that_the_device_has_not_ended_are_no_part_of_a_split() -> None:
    steps, calls = device_steps([6] * 6 + [900] * 4)
    pending = [*calls[:6], *(one._replace(seconds=None) for one in calls[6:])]
    assert split_device_steps(steps, pending) == pytest.approx((0.024, 0.006, 0))
    assert split_device_steps(steps, pending[5:]) is None
    assert split_device_steps(steps[:1], calls) is None


def test_collectives_of_several_groups_that_run_together_leave_no_negative_time() -> None:
    steps, calls = device_steps([25] * 10)
    both = [one for call in calls for one in (call, call._replace(group="1"))]
    assert split_device_steps(steps, both) == pytest.approx((0, 0.05, 0))


@given(st.lists(st.floats(0.5, 50), min_size=1, max_size=6), st.floats(0.5, 50), st.integers(3, 30))
def test_the_parts_are_a_step(gaps: list[float], last: float, count: int) -> None:
    calls = [sum(gaps[: end + 1]) for end in range(len(gaps))]
    steps, made = steps_of(calls, calls[-1] + last, count)
    split = split_steps(steps, made)
    assert split is not None
    assert sum(split) == pytest.approx(calls[-1] / 1e3 + last / 1e3 + 0.002, abs=1e-6)
    assert all(part >= 0 for part in split)


@pytest.mark.parametrize(
    ("recorded", "why"),
    [
        (None, "this torch does not record collectives"),
        (Recorded(tuple(device_steps([6] * 20)[1])), ""),
        (
            Recorded(tuple(one._replace(seconds=None) for one in device_steps([6] * 20)[1])),
            "torch does not time collectives of NCCL, unless TORCH_NCCL_ENABLE_TIMING is 1",
        ),
        (
            Recorded(tuple(device_steps([6] * 20)[1]), tuple(one.called_at - MS for one in device_steps([6] * 20)[1])),
            "the ranks pass data on in each step, as stages of a pipeline: their work differs",
        ),
    ],
)
def test_a_rank_whose_steps_cannot_be_split_says_why_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recorded: Recorded | None,
    why: str,
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PERDURE_GENERATION", "2")
    monkeypatch.setenv("PERDURE_PROGRESS_DIR", str(tmp_path))
    path = progress_path(tmp_path, 3)
    ProgressFile(path, generation=2, pid=1, source=COUNTED)
    monkeypatch.setattr(step_times, "_INTERVAL", 0.0)
    monkeypatch.setattr(step_times, "read_recorder", lambda: recorded)
    timer = step_times.StepTimer()
    timer._compiling = lambda: False
    ends = iter(step.ended for step in device_steps([6] * 99)[0] for _ in range(2))
    monkeypatch.setattr(step_times.time, "time_ns", lambda: next(ends))
    for _ in range(40):
        timer.on_begin(None, (), {})
        timer.on_end(None, (), {})
    told = capsys.readouterr().err
    assert told == (f"perdure: the steps of rank 3 are not split into computation and waiting: {why}\n" if why else "")
    progress = read_progress(path)
    assert progress is not None
    assert progress.step_times is not None
    assert progress.step_times.known is not bool(why)


def test_ranks_are_stages_where_they_pass_data_on_in_each_step() -> None:
    steps, calls = device_steps([6] * 20)
    sent = tuple(call.called_at - MS for call in calls)
    assert has_stages(steps, Recorded((), sent))
    assert has_stages(steps, Recorded(tuple(calls), sent))
    # The recorder has the newest calls only.
    assert has_stages(steps, Recorded(tuple(calls[-5:]), sent[-5:]))
    assert not has_stages(steps, Recorded(tuple(calls)))
    assert not has_stages(steps, Recorded(tuple(calls), sent[:9])), "such as once at the start"
    assert not has_stages(steps[:1], Recorded(tuple(calls), sent))


def steps_taking(milliseconds: Sequence[float]) -> list[OptimizerStep]:
    ends = [sum(milliseconds[:count]) for count in range(len(milliseconds) + 1)]
    return [OptimizerStep(int((end - 1) * MS), int(end * MS)) for end in ends]


def test_the_pace_of_steps_is_that_of_most() -> None:
    assert usual_pace(steps_taking([30] * 64)) == 30 * MS
    assert usual_pace(steps_taking([30] * 20 + [90_000] + [30] * 43)) == 30 * MS
    assert usual_pace(steps_taking([10, 50] * 32)) == 30 * MS
    assert usual_pace(steps_taking([30] * 8)) == 30 * MS
    assert usual_pace(steps_taking([30] * 7)) == 0


class Timed:
    """A rank with one collective in each step, whose clock is played."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("PERDURE_GENERATION", "1")
        monkeypatch.setenv("PERDURE_PROGRESS_DIR", str(folder))
        ProgressFile(progress_path(folder, 0), generation=1, pid=1, source=COUNTED)
        self._folder = folder
        self.now = 1000.0
        self._calls: deque[Collective] = deque(maxlen=2000)
        self._used = 0.0
        monkeypatch.setattr(step_times, "read_recorder", self._read)
        monkeypatch.setattr(step_times.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(step_times.time, "time_ns", lambda: int(self.now * 1e9))
        monkeypatch.setattr(step_times.time, "thread_time", lambda: self._used)
        self._timer = step_times.StepTimer()
        self._timer._compiling = lambda: False

    def _read(self) -> Recorded:
        self._used += 0.02
        return Recorded(tuple(self._calls))

    def step(self, seconds: float) -> None:
        self.now += 0.8 * seconds
        self._calls.append(Collective("0", len(self._calls), "gloo:all_reduce", int(self.now * 1e9), ended=True))
        self.now += 0.1 * seconds
        self._timer.on_begin(None, (), {})
        self.now += 0.1 * seconds
        self._timer.on_end(None, (), {})

    @property
    def measured(self) -> StepTimes:
        progress = read_progress(progress_path(self._folder, 0))
        assert progress is not None
        return progress.step_times or StepTimes(0.0, 0.0, 0.0, readings=0)

    def until_measured(self, seconds: float, *, steps: float, times: int) -> float:
        """Steps until a rank has measured so often that it computes for so long; returns the seconds that took."""
        began, found, last = self.now, 0, self.measured.readings
        while found < times:
            self.step(steps)
            if (new := self.measured).readings > last:
                last = new.readings
                found += new.compute == pytest.approx(seconds, rel=0.01)
        return self.now - began


def test_a_rank_measures_soon_again_once_steps_have_become_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Timed(tmp_path, monkeypatch)
    while rank.now < 2000:
        rank.step(0.1)
    before = rank.measured.readings
    since = rank.now
    while rank.now < since + 600:
        rank.step(0.1)
    assert rank.measured.readings - before <= 600 / 20
    assert rank.until_measured(0.1, steps=0.125, times=2) < 30
    # Only once in ten minutes: readings are as rare as before then.
    while rank.now < since + 900:
        rank.step(0.125)
    before, since = rank.measured.readings, rank.now
    while rank.now < since + 200:
        rank.step(0.2)
    assert rank.measured.readings - before <= 200 / 20


def test_pauses_of_all_ranks_make_no_quick_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Timed(tmp_path, monkeypatch)
    while rank.now < 2000:
        rank.step(0.1)
    before, since = rank.measured.readings, rank.now
    while rank.now < since + 600:
        for _ in range(100):
            rank.step(0.1)
        rank.step(30.0)
    assert rank.measured.readings - before <= 600 / 20


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


@pytest.mark.long("launchers")
def test_the_rank_that_computes_longer_is_seen_to(tmp_path: Path) -> None:
    port = free_port()
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
