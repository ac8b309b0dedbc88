"""Tests that an agent reports that its ranks run, and their first step only after it has detected one."""

from __future__ import annotations

import asyncio
import math
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.agent.progress import ProgressReader
from perdure.agent.telemetry import Telemetry
from perdure.contract import HoldRequest, Stall, Stepping
from perdure.spec.checkpoint import Checkpoint
from perdure_training.node_api import hold_times, layout
from perdure_training.node_api.bodies import EnteredReport, LauncherHello
from perdure_training.node_api.progress_file import COUNTED, OwnStepTimes, ProgressFile, StepTimes, progress_path
from tests.agent.bench import Bench
from tests.support.waiting import eventually


async def test_ranks_that_stay_alive_run_and_a_later_first_step_is_reported_again(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.apply(1)
    entered_at = datetime.now(UTC)
    bench.node.on_entered(EnteredReport(generation=1, time=entered_at.timestamp()))
    telemetry = Telemetry(bench.node, ProgressReader(tmp_path), to_group=bench.group)
    watching = asyncio.create_task(telemetry.run())
    try:
        await eventually(lambda: bool(bench.group.of(Stepping)))
        assert bench.node.state.summary == "running"
        path = progress_path(tmp_path / layout.PROGRESS, 0)
        ProgressFile(path, generation=1, pid=100, source=COUNTED).write(1, time=time.time())
        await eventually(lambda: len(bench.group.of(Stepping)) == 2)
    finally:
        watching.cancel()
    runs, steps = bench.group.of(Stepping)
    assert (runs.generation, runs.counted, runs.entered_at) == (1, False, entered_at)
    assert (steps.generation, steps.counted) == (1, True)
    assert bench.node.state.summary == "stepping"


async def test_a_first_step_that_comes_soon_is_all_that_is_reported(tmp_path: Path):
    bench = Bench(tmp_path)
    bench.apply(1)
    bench.node.on_entered(EnteredReport(generation=1, time=datetime.now(UTC).timestamp()))
    for counted in (True, True, False):
        bench.node.training.report_stepping(1, counted=counted, starts=None)
    assert [message.counted for message in bench.group.of(Stepping)] == [True]


@pytest.mark.parametrize(
    ("storage", "saving", "counted", "expected"),
    [
        (True, 1, True, True),
        (True, 0, True, False),
        (True, 0, False, None),
        (False, 0, True, None),
    ],
    ids=["it saves", "it does not", "it may begin yet", "no storage"],
)
async def test_the_first_step_tells_whether_the_ranks_save_into_the_storage(
    tmp_path: Path, storage: bool, saving: int, counted: bool, expected: bool | None
):
    bench = Bench(tmp_path)
    if storage:
        bench.config = bench.config.model_copy(update={"checkpoint": Checkpoint(storage="file:///ckpt")})
    bench.start().on_launcher_hello(LauncherHello(pid=1, attempt=1, processes=1))
    bench.apply(1)
    bench.node.on_saving(saving)
    # What a rank did before an agent was started again is known.
    bench.start()
    bench.node.training.report_stepping(1, counted=counted, starts=None)
    assert [message.saves for message in bench.group.of(Stepping)] == [expected]


def test_a_lease_carries_for_how_long_no_rank_has_stepped_beside_the_usual_time_of_a_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.apply(1)
    bench.enter(1)
    bench.node.training.report_stepping(1, counted=True, starts=None)
    ranks = ProgressReader(tmp_path)
    telemetry = Telemetry(bench.node, ranks, to_group=bench.group)
    writer = ProgressFile(progress_path(tmp_path / layout.PROGRESS, 0), generation=1, pid=100, source=COUNTED)
    assert telemetry.view(1).idle is None
    now = time.monotonic()
    for step in range(1, 12):
        writer.write(step, time=time.time())
        ranks.sample(generation=1, base_rank=0, processes=1, now=now - 72 + step / 10)
    view = telemetry.view(1)
    assert view.idle is not None
    assert view.usual_step is not None
    # The last step was 70.9 s before, and the look takes its time.
    assert 70.8 < view.idle.total_seconds() < 71 + time.monotonic() - now
    assert abs(view.usual_step.total_seconds() - 0.1) < 0.01
    bench.apply(2)
    assert telemetry.view(1).idle is None, "ranks that are to end need not step"


def test_a_request_to_wait_at_a_step_excuses_ranks_no_longer_than_they_wait(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.apply(1)
    bench.enter(1)
    bench.node.training.report_stepping(1, counted=True, starts=None)
    ranks = ProgressReader(tmp_path)
    telemetry = Telemetry(bench.node, ranks, to_group=bench.group)
    writer = ProgressFile(progress_path(tmp_path / layout.PROGRESS, 0), generation=1, pid=100, source=COUNTED)
    for step in range(1, 12):
        writer.write(step, time=time.time())
        ranks.sample(generation=1, base_rank=0, processes=1, now=step / 10)
    usual, after = ranks.stall_detector.usual, bench.config.timing.stall.after.total_seconds()
    reported: list[float] = []
    for now in range(2, 1000):
        if now in (2, 202):
            bench.desire(hold=HoldRequest(number=now, generation=1))
        telemetry.look_for_stall(now)
        assert ranks.stall_detector.usual == usual
        reported += [now] * (len(bench.group.of(Stall)) - len(reported))
    [at] = reported
    assert 202 + hold_times.LONGEST + after - 1 <= at <= 202 + hold_times.LONGEST + after


def test_a_lease_tells_that_a_rank_cannot_split_its_steps(tmp_path: Path) -> None:
    ranks = ProgressReader(tmp_path)
    telemetry = Telemetry(Bench(tmp_path).node, ranks, to_group=Bench(tmp_path).group)
    for rank, unsplit in ((0, False), (1, True)):
        path = progress_path(tmp_path / layout.PROGRESS, rank)
        ProgressFile(path, generation=1, pid=100 + rank, source=COUNTED).write(9, time=time.time())
        environment = {"PERDURE_PROGRESS_DIR": str(path.parent), "RANK": str(rank), "PERDURE_GENERATION": "1"}
        own = OwnStepTimes(environment)
        ranks.sample(generation=1, base_rank=0, processes=2, now=time.monotonic())
        assert not telemetry.view(1).unsplit_steps
        own.write(StepTimes(*((math.nan,) * 3 if unsplit else (0.2, 0.1, 0.0)), readings=1))
        ranks.sample(generation=1, base_rank=0, processes=2, now=time.monotonic())
        assert telemetry.view(1).unsplit_steps is unsplit
