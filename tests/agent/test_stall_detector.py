"""Tests of stalled ranks: real processes that step, frozen with SIGSTOP, beside a real agent."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perdure.agent.stall_detector import GapSketch, StallDetector
from perdure.contract import HoldRequest, World
from perdure.spec.timing import StallTiming
from perdure_training.node_api.progress_file import read_progress
from tests.agent.harness import QUICK, RunningAgent, Workflows, running_agent, utc
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually

STEPS = """
import os, pathlib, sys, time
from perdure_training.node_api.progress_file import COUNTED, ProgressFile
writer = ProgressFile(pathlib.Path(sys.argv[1]), generation=int(sys.argv[2]), pid=os.getpid(), source=COUNTED)
for step in range(1, 100_000):
    writer.write(step, time=time.time())
    time.sleep(0.05)
"""
AFTER = timedelta(seconds=3)
FIRST_STEP = timedelta(seconds=2)
TIMING = QUICK.model_copy(update={"stall": StallTiming(after=AFTER, steps=5)})


@pytest.fixture
async def agent(
    temporal_server: DevServer, workflows: Workflows, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningAgent]:
    async with running_agent(temporal_server, workflows, tmp_path_factory.mktemp("n"), timing=TIMING) as running:
        await running.launcher_hello()
        yield running


@asynccontextmanager
async def two_ranks(agent: RunningAgent, generation: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Enters a world with two ranks that step."""
    await enter(agent, agent.world(generation, world_size=2))
    async with ranks_of(agent, generation) as ranks:
        yield ranks


async def enter(agent: RunningAgent, world: World) -> datetime:
    """Enters a world, and returns the time of that."""
    await agent.post("/v1/rendezvous/ready", after_generation=world.generation - 1, store_ports=[29501], processes=2)
    await agent.desire(world=world)
    entered = datetime.now(UTC)
    await agent.post(
        "/v1/rendezvous/entered", generation=world.generation, time=entered.timestamp(), store_ports=[29502]
    )
    return entered


@asynccontextmanager
async def ranks_of(agent: RunningAgent, generation: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Two ranks that step."""
    folder: Path = agent.run_dir / "progress"
    folder.mkdir(exist_ok=True)
    ranks = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", STEPS, str(folder / f"rank-{rank}"), str(generation), start_new_session=True
        )
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            await rank.wait()


async def test_a_stall_is_told_once_and_that_it_is_over_once(agent: RunningAgent, workflows: Workflows) -> None:
    async with two_ranks(agent, 1) as ranks:
        await workflows.expect(workflows.group, "stepping")
        await agent.start_lease(1)
        # One that is slow or frozen does not make a stall while another one steps.
        ranks[0].send_signal(signal.SIGSTOP)
        await workflows.beats(3)
        assert not await workflows.seen(workflows.group, "stall")
        ranks[1].send_signal(signal.SIGSTOP)
        [stall] = await workflows.expect(workflows.group, "stall")
        assert stall["generation"] == 1
        last_step = read_progress(agent.run_dir / "progress" / "rank-1")
        assert last_step
        assert last_step.time <= utc(stall["since"]).timestamp()
        # Not when it was detected: clocks are read one after the other.
        assert utc(stall["time"]) - utc(stall["since"]) > AFTER / 2
        assert stall["usual_step"] is not None
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        _, over = await workflows.expect(workflows.group, "stall", count=2)
        assert over["since"] is None
        await workflows.beats(2)
        assert len(await workflows.seen(workflows.group, "stall")) == 2


async def test_ranks_that_wait_at_a_step_by_request_are_not_stalled(agent: RunningAgent, workflows: Workflows) -> None:
    async with two_ranks(agent, 1) as ranks:
        await workflows.expect(workflows.group, "stepping")
        await agent.start_lease(1)
        await agent.desire(hold=HoldRequest(number=1, generation=1))
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await eventually(lambda: time.monotonic() - stopped > 2 * AFTER.total_seconds())
        await workflows.beats(2)
        assert not await workflows.seen(workflows.group, "stall")
        # From now on they are to step.
        released = datetime.now(UTC)
        await agent.desire(hold=None)
        [stall] = await workflows.expect(workflows.group, "stall")
        assert utc(stall["since"]) > released - timedelta(seconds=2)


async def test_an_agent_that_restarts_says_that_a_stall_is_over(agent: RunningAgent, workflows: Workflows) -> None:
    async with two_ranks(agent, 1) as ranks:
        await workflows.expect(workflows.group, "stepping")
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        await workflows.expect(workflows.group, "stall")
        await agent.kill()
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
        await agent.start()
        _, over = await workflows.expect(workflows.group, "stall", count=2)
        assert over["since"] is None


async def test_ranks_that_ended_are_not_stalled(agent: RunningAgent, workflows: Workflows) -> None:
    async with two_ranks(agent, 1):
        await workflows.expect(workflows.group, "stepping")
    await agent.post("/v1/rendezvous/finished", generation=1, time=time.time())
    await agent.start_lease(1)
    await workflows.beats(3)
    assert not await workflows.seen(workflows.group, "stall")


def test_a_wait_by_request_is_no_pause_and_no_part_of_a_step():
    detector = StallDetector(GapSketch())
    detector.follow((1,), 10.0)
    detector.follow((3,), 12.0)
    for now in (12.5, 60.0, 200.0):
        detector.excuse(now)
    assert (detector.usual, detector.idle(201.0)) == (1.0, 1.0)
    detector.follow((4,), 201.0)
    assert (detector.usual, detector.take_pauses()) == (1.0, [])


def test_the_pace_is_that_of_the_generation_and_any_rank_moves_it():
    detector = StallDetector(GapSketch())
    assert (detector.usual, detector.idle(5.0)) == (None, None)
    detector.follow((1,), 10.0)
    assert (detector.usual, detector.idle(13.0)) == (None, 3.0)
    detector.follow((3, 1), 14.0)
    detector.follow((3, 1), 19.0)
    assert (detector.usual, detector.idle(19.0)) == (2.0, 5.0)
    detector.follow((3, 2), 20.0)
    assert (detector.usual, detector.idle(20.0)) == (5.0, 0.0)
    # A script that begins to report counts by itself.
    detector.follow((1, 1), 21.0)
    assert detector.usual is None
    detector.follow((2, 2), 22.0)
    assert detector.usual == 1.0


async def test_ranks_that_make_no_first_step_in_time_are_reported_and_that_they_step_after_all(
    agent: RunningAgent, workflows: Workflows
) -> None:
    limited = agent.world(1, world_size=2).model_copy(update={"first_step": FIRST_STEP})
    entered = await enter(agent, limited)
    [stall] = await workflows.expect(workflows.group, "stall")
    assert (stall["generation"], stall["at_start"]) == (1, True)
    assert utc(stall["since"]) >= entered
    assert utc(stall["time"]) - utc(stall["since"]) > FIRST_STEP / 2
    async with ranks_of(agent, 1):
        _, over = await workflows.expect(workflows.group, "stall", count=2)
        assert over["since"] is None


async def test_ranks_without_a_limit_may_take_any_time_for_their_first_step(
    agent: RunningAgent, workflows: Workflows
) -> None:
    await enter(agent, agent.world(1, world_size=2))
    await agent.start_lease(1)
    await workflows.beats(3)
    assert not await workflows.seen(workflows.group, "stall")


def test_a_pause_is_much_longer_than_a_step_and_is_taken_once():
    detector = StallDetector(GapSketch())
    detector.follow((1,), 0.0)
    for step in range(2, 12):
        detector.follow((step,), float(step - 1))
    detector.follow((12,), 13.0)
    assert detector.take_pauses() == []
    detector.follow((13,), 60.0)
    assert detector.take_pauses() == [47.0]
    assert detector.take_pauses() == []
