"""The times of an agent whose machine's clock is off."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import activity

from perdure.agent.server_clock import ServerClock
from perdure.agent.transport import TemporalControlPlane
from perdure.contract import LeaseRequest, NodeCredentials
from perdure.contract.agents import Failure, FailureKind, Joined, LeaseTaken, LeaseView, Progress
from perdure.contract.hangs import StallEvidence, StallLook
from perdure_training.node_api.bodies import RankExit
from tests.agent.harness import RunningAgent, Workflows
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually

SERVER = datetime(2026, 1, 1, 12, tzinfo=UTC)
SENDER = NodeCredentials(uid="0a1b2c3d", role="worker", rank=0, incarnation=1, token="t" * 16)


class Machine:
    """A machine whose clock is so many seconds ahead of the server's."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead
        self.now = 1000.0

    def machine(self) -> float:
        return (SERVER + timedelta(seconds=self.now - 1000 + self.ahead)).timestamp()

    def steady(self) -> float:
        return self.now

    @property
    def server(self) -> datetime:
        return SERVER + timedelta(seconds=self.now - 1000)

    def hand_out(self, clock: ServerClock, *, late: float = 0.0) -> None:
        """Begins an activity that the server handed out so many seconds ago."""
        clock.observe(self.server - timedelta(seconds=late))


def clock_of(machine: Machine) -> ServerClock:
    return ServerClock(machine=machine.machine, steady=machine.steady)


@pytest.mark.parametrize("ahead", [90.0, -90.0])
def test_a_difference_is_the_least_delay_s(ahead: float) -> None:
    machine = Machine(ahead)
    clock = clock_of(machine)
    assert clock.ahead == timedelta(), "nothing is known yet"
    for late in (5.0, 0.0, 20.0):
        machine.hand_out(clock, late=late)
        machine.now += 10
    assert clock.ahead.total_seconds() == pytest.approx(-ahead)


def test_a_small_difference_changes_nothing_and_a_set_clock_counts_at_once() -> None:
    machine = Machine(1.5)
    clock = clock_of(machine)
    machine.hand_out(clock)
    assert clock.ahead == timedelta()
    machine.ahead = -300
    assert clock.ahead.total_seconds() == pytest.approx(300)
    machine.ahead = -300.5
    assert clock.ahead.total_seconds() == pytest.approx(300), "one event keeps its time"
    machine.ahead = 0
    assert clock.ahead == timedelta()


def test_all_times_of_a_message_are_moved_and_identities_kept() -> None:
    machine = Machine(60)
    clock = clock_of(machine)
    machine.hand_out(clock)
    local, minute = SERVER + timedelta(seconds=60), timedelta(seconds=60)
    look = StallLook(generation=1, since=local - minute, taken_at=local, usual_steps=9)
    evidence = clock.moved(StallEvidence(sender=SENDER, sequence=1, time=local, look=look))
    assert (evidence.time, evidence.look.taken_at, evidence.look.since) == (SERVER, SERVER, SERVER - minute)
    exits = (RankExit(local_rank=0, time=local.timestamp()), RankExit(local_rank=1))
    failure = clock.moved(
        Failure(sender=SENDER, sequence=2, time=local, generation=1, kind=FailureKind.RANKS, ranks=exits)
    )
    assert [one.time for one in failure.ranks] == [SERVER.timestamp(), None]
    joined = Joined(sender=SENDER, sequence=3, time=local, address="127.0.0.1", agent_started_at=local)
    assert (clock.moved(joined).time, clock.moved(joined).agent_started_at) == (SERVER, local)
    view = clock.moved(LeaseView(epoch=1, time=local, progress=Progress(step=5, last_step_at=local)))
    assert view.progress is not None
    assert (view.time, view.progress.last_step_at, view.progress.step) == (SERVER, SERVER, 5)


async def test_what_an_agent_reports_is_on_the_server_s_clock(
    temporal_server: DevServer, workflows: Workflows, tmp_path: Path
) -> None:
    agent = RunningAgent(temporal_server, workflows, tmp_path)
    control = TemporalControlPlane(agent.config, client=await temporal_server.client())
    control.clock = ServerClock(machine=lambda: time.time() + 600)
    begun = datetime.now(UTC)

    @activity.defn(name="hold_lease")
    async def hold_lease(request: LeaseRequest) -> None:
        local = datetime.now(UTC) + timedelta(seconds=600)
        common: dict[str, Any] = {"sender": agent.node, "sequence": 1, "time": local}
        await control.signal(LeaseTaken(**common, agent_started_at=local, epoch=request.epoch))
        activity.heartbeat(LeaseView(epoch=request.epoch, time=local))
        await asyncio.Event().wait()

    serving = asyncio.create_task(control.serve([hold_lease]))
    lease = await agent.start_lease(epoch=1)
    [taken] = await workflows.expect(workflows.group, "lease_taken")
    report = await eventually(workflows.report)
    ended = datetime.now(UTC)
    await workflows.group.terminate("over")
    serving.cancel()
    await asyncio.gather(serving, lease, return_exceptions=True)
    margin = timedelta(seconds=2)
    for told in (taken["time"], report["time"]):
        assert begun - margin <= datetime.fromisoformat(told) <= ended + margin
