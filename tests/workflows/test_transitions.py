"""What a group tells its job, at moments that no server can be made to bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio import workflow

from workflows import transitions as edges_module
from workflows.delivery import Delivery
from workflows.messages import EdgeKind, GroupEdges
from workflows.node_record import EdgesCarried
from workflows.transitions import EdgeBatch


class Job:
    """Takes messages, or is closed; another run of it adopts the group while a message is in flight."""

    def __init__(self, adopts: Callable[[], None], *, closed: bool) -> None:
        self.told: list[GroupEdges] = []
        self._adopts = adopts
        self._closed = closed

    async def take(self, job_id: str, signal: str, message: GroupEdges, **_: Any) -> Delivery:
        self.told.append(message)
        if len(self.told) == 1:
            self._adopts()
            if self._closed:
                return Delivery.CLOSED
        return Delivery.TAKEN


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("tenure", ["new", "old"])
async def test_a_job_that_adopts_a_group_while_it_winds_down_learns_that_it_is_gone(
    closed: bool, tenure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def until(condition: Callable[[], bool], **_: Any) -> None:
        assert condition()

    edges = EdgeBatch(
        job_id="job/ns/name", uid="1", group=0, gather=timedelta(seconds=1), carried=EdgesCarried(tenure="old")
    )
    job = Job(lambda: edges.adopted((), tenure=tenure), closed=closed)
    monkeypatch.setattr(edges_module, "deliver", job.take)
    monkeypatch.setattr(workflow, "wait_condition", until)
    edges.wound_down()
    async with asyncio.timeout(10):
        await edges.deliver()
    assert [(message.tenure, message.adopted, message.wound_down) for message in job.told] == [
        ("old", None, True),
        (tenure, (), True),
    ]


async def test_edges_whose_delivery_seemed_to_fail_are_numbered_alike_when_they_go_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edges = EdgeBatch(job_id="job/ns/name", uid="1", group=0, gather=timedelta(0), carried=EdgesCarried(tenure="t"))
    told: list[GroupEdges] = []

    def add(rank: int) -> None:
        edges.add(kind=EdgeKind.READY, rank=rank, incarnation=1, time=datetime.now(UTC))

    async def take(job_id: str, signal: str, message: GroupEdges, **_: Any) -> Delivery:
        told.append(message)
        if len(told) == 3:
            edges.wound_down()
        else:
            add(len(told))
        return Delivery.FAILED if len(told) == 2 else Delivery.TAKEN

    async def until(condition: Callable[[], bool], **_: Any) -> None: ...

    monkeypatch.setattr(edges_module, "deliver", take)
    monkeypatch.setattr(workflow, "wait_condition", until)
    add(0)
    async with asyncio.timeout(10):
        await edges.deliver()
    assert [(one.sequence, one.before, [edge.rank for edge in one.edges]) for one in told] == [
        (1, 0, [0]),
        (2, 1, [1]),
        (3, 1, [1, 2]),
        (4, 3, []),
    ]


async def test_that_a_group_is_gone_is_reported_again_until_the_job_takes_it_or_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that has adopted the group waits for this report, and no later one comes."""
    edges = EdgeBatch(job_id="job/ns/name", uid="1", group=0, gather=timedelta(0), carried=EdgesCarried(tenure="t"))
    answers = [Delivery.FAILED, Delivery.FAILED, Delivery.TAKEN]
    told: list[GroupEdges] = []

    async def take(job_id: str, signal: str, message: GroupEdges, **_: Any) -> Delivery:
        told.append(message)
        return answers[len(told) - 1]

    async def until(condition: Callable[[], bool], **_: Any) -> None: ...

    monkeypatch.setattr(edges_module, "deliver", take)
    monkeypatch.setattr(workflow, "wait_condition", until)
    edges.wound_down()
    async with asyncio.timeout(10):
        await edges.deliver()
    assert [message.wound_down for message in told] == [True, True, True]
