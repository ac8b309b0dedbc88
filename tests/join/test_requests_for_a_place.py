"""Tests of how often a machine asks for a place that is not there yet: each request is events of the job's history."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import pytest

from perdure.activities.nodes.joined.machine import Machine
from perdure.base.errors import (
    ControlPlaneOverloaded,
    ControlPlaneUnreachable,
    ExitCode,
    JoinRefused,
    PerdureError,
)
from perdure.contract import JoinAnswer, JoinRefusal, JoinRequest, LossCause
from perdure.join import machine
from perdure.join.machine import JoinOptions, MachineInJob

SOON = 0.01
PAUSE = 100 * SOON


class Pausing:
    """A connection to a job whose place opens after a pause."""

    session = "session-of-a"

    def __init__(self, *, fails: Sequence[Exception] = (), again: timedelta | None = None) -> None:
        self.asked = 0
        self.again = again
        self.fails = list(fails)
        self.opens_at = time.monotonic() + PAUSE

    async def request_place(self, request: JoinRequest) -> JoinAnswer:
        self.asked += 1
        if self.fails:
            raise self.fails.pop(0)
        if time.monotonic() < self.opens_at:
            return JoinAnswer(reason="its place opens after a pause", again=self.again)
        return JoinAnswer.model_construct(node=cast("Any", object()))


async def test_a_place_that_does_not_open_soon_is_asked_for_ever_less_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_SOON", SOON)
    job, said = Pausing(), list[str]()
    own = Machine(node_id="a", host="here", address="127.0.0.1")
    joining = MachineInJob(cast("Any", job), own, JoinOptions(job="job"), say=said.append)
    await joining._take_place()
    assert job.asked < PAUSE / SOON / 2
    assert said == ["waiting: its place opens after a pause"]


async def test_a_machine_requests_its_place_when_the_job_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_SOON", 1000.0)
    job = Pausing(again=timedelta(seconds=2 * PAUSE))
    own = Machine(node_id="a", host="here", address="127.0.0.1")
    await MachineInJob(cast("Any", job), own, JoinOptions(job="job"), say=lambda line: None)._take_place()
    assert job.asked == 2


async def test_machines_that_found_no_place_request_one_ever_less_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_LATER", SOON)
    full = JoinRefused("all its 2 places are taken", kind=JoinRefusal.NO_PLACE, exit_code=ExitCode.INFRASTRUCTURE)
    job = Pausing(fails=[full] * 40)
    own = Machine(node_id="a", host="here", address="127.0.0.1")
    joining = MachineInJob(cast("Any", job), own, JoinOptions(job="job", wait=True), say=lambda line: None)
    pauses: list[float] = []
    now = 0.0

    async def wait(reason: str, seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds
        job.opens_at = 0.0

    monkeypatch.setattr(joining, "_wait", wait)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    await joining._take_place()
    assert pauses[0] == SOON
    assert pauses[-1] > 2 * SOON
    assert pauses == sorted(pauses)


@pytest.mark.parametrize(
    ("error", "waits"),
    [(ControlPlaneOverloaded("10 at a time"), True), (ControlPlaneUnreachable("nobody is there"), False)],
    ids=["overloaded", "away"],
)
async def test_a_server_with_too_much_to_do_is_asked_again_without_wait(
    monkeypatch: pytest.MonkeyPatch, error: PerdureError, waits: bool
):
    monkeypatch.setattr(machine, "_LATER", SOON)
    job = Pausing(fails=[error] * 3)
    own = Machine(node_id="a", host="here", address="127.0.0.1")
    joining = MachineInJob(cast("Any", job), own, JoinOptions(job="job"), say=lambda line: None)
    with contextlib.nullcontext() if waits else pytest.raises(ControlPlaneUnreachable):
        await joining._take_place()
    assert bool(job.fails) != waits


class Answering(Pausing):
    """A connection whose answer is on its way."""

    def __init__(self, answer: JoinAnswer) -> None:
        super().__init__()
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.answer = answer
        self.given_back: list[tuple[object, str, LossCause]] = []

    async def request_place(self, request: JoinRequest) -> JoinAnswer:
        self.is_asked.set()
        await self.may_answer.wait()
        return self.answer

    async def report_departure(self, place: object, *, time: datetime, reason: str, cause: LossCause) -> None:
        self.given_back.append((place, reason, cause))


@pytest.mark.parametrize("answers", [True, False], ids=["a place", "no answer"])
async def test_a_place_that_is_given_while_a_signal_comes_is_given_back(monkeypatch: pytest.MonkeyPatch, answers: bool):
    monkeypatch.setattr(machine, "_ANSWER_WITHIN", 60.0 if answers else 0.0)
    place = cast("Any", object())
    job = Answering(JoinAnswer.model_construct(node=place))
    own = Machine(node_id="a", host="here", address="127.0.0.1")
    leaving = job.may_answer.set if answers else lambda: None
    options = JoinOptions(job="job")
    joining = MachineInJob(cast("Any", job), own, options, say=lambda line: None, on_leaving=leaving)
    running = asyncio.create_task(joining.run())
    await job.is_asked.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 128 + signal.SIGTERM
    told = (place, "`perdure join` on here got SIGTERM", LossCause.WANTED)
    assert job.given_back == ([told] if answers else [])
