"""Tests of the transitions that a group reports to its job, at moments that no server can be made to produce."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio import workflow

from perdure.contract import GroupTransitions
from perdure.contract.transitions import NodeJoined, NodeReady, NodeStepping
from perdure.workflows import transitions as transitions_module
from perdure.workflows.delivery import Delivery
from perdure.workflows.node_record import TransitionsCarried
from perdure.workflows.transitions import TransitionBatch
from tests.support.waiting import DEADLINE


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "now", lambda: datetime(2026, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(workflow, "info", lambda: SimpleNamespace(run_id="this run"))


class Job:
    """Takes messages, or is closed; another run of it adopts the group while a message is in flight."""

    def __init__(self, adopts: Callable[[], None], *, closed: bool) -> None:
        self.told: list[GroupTransitions] = []
        self._adopts = adopts
        self._closed = closed

    async def take(self, job_id: str, signal: str, message: GroupTransitions, **_: Any) -> Delivery:
        self.told.append(message)
        if len(self.told) == 1:
            self._adopts()
            if self._closed:
                return Delivery.CLOSED
        return Delivery.TAKEN


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("ownership_epoch", ["new", "old"])
async def test_a_job_that_adopts_a_group_while_it_winds_down_learns_that_it_is_gone(
    closed: bool, ownership_epoch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until(condition: Callable[[], bool], **_: Any) -> None:
        assert condition()

    transitions = TransitionBatch(
        job_id="job/ns/name",
        uid="1",
        role="worker",
        group=0,
        gather=timedelta(seconds=1),
        carried=TransitionsCarried(ownership_epoch="old"),
    )
    job = Job(lambda: transitions.report_adoption((), ownership_epoch=ownership_epoch), closed=closed)
    monkeypatch.setattr(transitions_module, "deliver", job.take)
    monkeypatch.setattr(workflow, "wait_condition", until)
    transitions.report_end()
    async with asyncio.timeout(DEADLINE):
        await transitions.deliver()
    assert [(message.ownership_epoch, message.adopted, message.wound_down) for message in job.told] == [
        ("old", None, True),
        (ownership_epoch, (), True),
    ]


async def test_edges_whose_delivery_seemed_to_fail_are_numbered_alike_when_they_go_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transitions = TransitionBatch(
        job_id="job/ns/name",
        uid="1",
        role="worker",
        group=0,
        gather=timedelta(0),
        carried=TransitionsCarried(ownership_epoch="t"),
    )
    told: list[GroupTransitions] = []

    def add(rank: int) -> None:
        transitions.add(NodeReady(rank=rank, incarnation=1, time=datetime.now(UTC)))

    async def take(job_id: str, signal: str, message: GroupTransitions, **_: Any) -> Delivery:
        told.append(message)
        if len(told) == 3:
            transitions.report_end()
        else:
            add(len(told))
        return Delivery.FAILED if len(told) == 2 else Delivery.TAKEN

    async def until(condition: Callable[[], bool], **_: Any) -> None: ...

    monkeypatch.setattr(transitions_module, "deliver", take)
    monkeypatch.setattr(workflow, "wait_condition", until)
    add(0)
    async with asyncio.timeout(DEADLINE):
        await transitions.deliver()
    assert [(one.sequence, one.before, [transition.rank for transition in one.transitions]) for one in told] == [
        (1, 0, [0]),
        (2, 1, [1]),
        (3, 1, [1, 2]),
        (4, 3, []),
    ]


async def test_that_a_group_is_gone_is_reported_again_until_the_job_takes_it_or_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that has adopted the group waits for this report, and no later one comes."""
    transitions = TransitionBatch(
        job_id="job/ns/name",
        uid="1",
        role="worker",
        group=0,
        gather=timedelta(0),
        carried=TransitionsCarried(ownership_epoch="t"),
    )
    answers = [Delivery.FAILED, Delivery.FAILED, Delivery.TAKEN]
    told: list[GroupTransitions] = []

    async def take(job_id: str, signal: str, message: GroupTransitions, **_: Any) -> Delivery:
        told.append(message)
        return answers[len(told) - 1]

    async def until(condition: Callable[[], bool], **_: Any) -> None: ...

    monkeypatch.setattr(transitions_module, "deliver", take)
    monkeypatch.setattr(workflow, "wait_condition", until)
    transitions.report_end()
    async with asyncio.timeout(DEADLINE):
        await transitions.deliver()
    assert [message.wound_down for message in told] == [True, True, True]


class Pauses:
    """Stands for a group that gathers: each pause adds one transition, and ends if that may end it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, kind: type[NodeJoined | NodeStepping]) -> None:
        self.ended: list[bool] = []
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self._kind = kind
        self.transitions = TransitionBatch(
            job_id="job/ns/name",
            uid="1",
            role="worker",
            group=0,
            gather=timedelta(seconds=1),
            carried=TransitionsCarried(ownership_epoch="t"),
        )
        monkeypatch.setattr(transitions_module, "deliver", self._take)
        monkeypatch.setattr(workflow, "wait_condition", self._until)
        monkeypatch.setattr(workflow, "now", lambda: self.now)

    async def deliver(self, *, pauses: int, quiet_before: int | None = None) -> list[bool]:
        """Returns which of the pauses ended before their time; a second and a half passes before one of them."""
        self._left, self._quiet_before = pauses, quiet_before
        self._add()
        async with asyncio.timeout(DEADLINE):
            await self.transitions.deliver()
        return self.ended

    def _add(self) -> None:
        self.transitions.add(self._kind(rank=0, incarnation=1, time=self.now))

    async def _take(self, *_: Any, **__: Any) -> Delivery:
        if len(self.ended) == self._quiet_before:
            self.now += timedelta(seconds=1.5)
        return Delivery.TAKEN

    async def _until(
        self, condition: Callable[[], bool], *, timeout: timedelta | None = None, timeout_summary: str | None = None
    ) -> None:
        if timeout is None:
            assert condition()
            return
        self._left -= 1
        self._add()
        self.ended.append(condition())
        if not self._left:
            self.transitions.report_end()


async def test_a_replacement_that_joins_soon_after_the_loss_is_reported_at_once(monkeypatch: pytest.MonkeyPatch):
    assert await Pauses(monkeypatch, kind=NodeJoined).deliver(pauses=3) == [True, True, True]


async def test_a_step_waits_for_those_of_other_nodes(monkeypatch: pytest.MonkeyPatch):
    assert await Pauses(monkeypatch, kind=NodeStepping).deliver(pauses=3) == [False, False, False]


async def test_many_nodes_that_join_together_are_gathered_after_the_first_ones(monkeypatch: pytest.MonkeyPatch):
    pauses = Pauses(monkeypatch, kind=NodeJoined)
    assert await pauses.deliver(pauses=12, quiet_before=10) == [True] * 8 + [False] * 2 + [True, False]
