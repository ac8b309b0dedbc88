"""Tests of how often a machine asks for a place that is not there yet: each request is events of the job's history."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest

from perdure.activities.nodes.joined.machine import Machine
from perdure.contract import JoinAnswer, JoinRequest
from perdure.join import machine
from perdure.join.machine import JoinOptions, MachineInJob

SOON = 0.01
PAUSE = 100 * SOON


class Pausing:
    """A connection to a job whose place opens after a pause."""

    session = "session-of-a"

    def __init__(self) -> None:
        self.asked = 0
        self.opens_at = time.monotonic() + PAUSE

    async def request_place(self, request: JoinRequest) -> JoinAnswer:
        self.asked += 1
        if time.monotonic() < self.opens_at:
            return JoinAnswer(reason="its place opens after a pause")
        return JoinAnswer.model_construct(node=cast("Any", object()))


async def test_a_place_that_does_not_open_soon_is_asked_for_ever_less_often(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_SOON", SOON)
    job, said = Pausing(), list[str]()
    own = Machine(node_id="a", host="here", address="127.0.0.1")
    joining = MachineInJob(cast("Any", job), own, JoinOptions(job="job"), say=said.append)
    await joining._take_place()
    assert job.asked < PAUSE / SOON / 2
    assert said == ["waiting: its place opens after a pause"]
