"""Tests of how a group holds leases: which end says that a node is silent, and which that it is unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.exceptions import TimeoutType

from perdure.contract import Joined, LeaseTaken
from perdure.contract.transitions import AnyTransition, NodeReachable, NodeUnreachable
from perdure.workflows import agent_reports, options
from perdure.workflows.agent_calls import hold_lease
from perdure.workflows.node_table import NodeTable
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import incidents, node, running, status
from tests.workflows.test_node_desired import LEASE, NODE, NOW, TIMING, joined, table_of, timed_out
from tests.workflows.ways import replayed

TO_TAKE = TIMING.lease.schedule_to_start


class Leases:
    """Stands for the server, which ends one lease after another as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Callable[[NodeTable], TimeoutType]) -> None:
        self.table = table_of(joined())
        self.waits: list[timedelta | None] = []
        """The time within which each lease was to be taken."""
        self._ends = iter(ends)
        monkeypatch.setattr(workflow, "execute_activity", self._execute)
        monkeypatch.setattr(workflow, "now", lambda: NOW)

    async def _execute(self, name: str, argument: Any, *, schedule_to_start_timeout: timedelta | None, **_: Any) -> Any:
        self.waits.append(schedule_to_start_timeout)
        end = next(self._ends, None)
        if end is None:
            # The node is no longer desired.
            del self.table.records[NODE.rank]
            return
        raise timed_out(name, end(self.table))

    def hold(self) -> list[type[AnyTransition]]:
        """Returns what the job learns."""
        asyncio.run(hold_lease(self.table, NODE))
        return [type(one) for one in self.table.transitions.carried.waiting]


def not_taken(table: NodeTable) -> TimeoutType:
    return TimeoutType.SCHEDULE_TO_START


def not_renewed(table: NodeTable) -> TimeoutType:
    return TimeoutType.HEARTBEAT


def taken_and_not_renewed(table: NodeTable) -> TimeoutType:
    record = table.records[NODE.rank]
    sequence = record.sequences.get("lease_taken", 0) + 1
    agent_reports.lease_taken(
        table, LeaseTaken(sender=NODE, sequence=sequence, time=NOW, agent_started_at=NOW, epoch=record.epoch)
    )
    assert table.records[NODE.rank].silent_since is None
    return TimeoutType.HEARTBEAT


def test_a_lease_that_is_not_renewed_shows_silence_and_one_that_is_not_taken_either_that_the_node_is_unreachable(
    monkeypatch: pytest.MonkeyPatch,
):
    silent: list[Any] = []

    def look(table: NodeTable) -> TimeoutType:
        silent.append((table.records[NODE.rank].silent_since, table.records[NODE.rank].reachable))
        return TimeoutType.SCHEDULE_TO_START

    leases = Leases(monkeypatch, taken_and_not_renewed, look)
    assert leases.hold() == [NodeUnreachable]
    assert silent == [(NOW - LEASE, True)]
    assert leases.waits == [TO_TAKE, TO_TAKE, None]


def test_a_node_that_came_back_becomes_unreachable_again(monkeypatch: pytest.MonkeyPatch):
    leases = Leases(monkeypatch, not_taken, taken_and_not_renewed, not_taken)
    assert leases.hold() == [NodeUnreachable, NodeReachable, NodeUnreachable]
    assert leases.waits == [TO_TAKE, None, TO_TAKE, None]


def test_an_agent_that_restarts_ends_the_silence_of_its_node(monkeypatch: pytest.MonkeyPatch):
    def joins(table: NodeTable) -> TimeoutType:
        agent_reports.joined(
            table,
            Joined(sender=NODE, sequence=1, time=NOW, agent_started_at=NOW, address="127.0.0.1", host="here"),
        )
        assert table.records[NODE.rank].silent_since is None
        return TimeoutType.SCHEDULE_TO_START

    leases = Leases(monkeypatch, not_renewed, joins)
    assert leases.table.records[NODE.rank].silent_since is None
    assert leases.hold() == [NodeUnreachable]


def test_only_the_group_schedules_a_lease_again_that_was_not_renewed():
    assert options.LEASE_RETRY.non_retryable_error_types == ["TemporalTimeout:Heartbeat"]


@replayed
async def test_an_agent_that_does_not_renew_its_lease_takes_the_next_and_is_not_lost(fleet: Fleet):
    lease = {"heartbeat": "500ms", "timeout": "1s"}
    handle = await submit(fleet, job_spec("2", timing={"lease": lease}))
    await running(handle, nodes=2)
    late = await node(fleet, handle, 1)
    late.renews = False
    first = late.lease_epochs[-1]
    await eventually(lambda: late.lease_epochs[-1] > first + 1, what="the group schedules the lease again")
    late.renews = True
    known = await status(handle)
    assert (known.generation, known.nodes) == (1, 2)
    assert not await incidents(handle)


def test_a_node_that_gives_each_lease_back_at_once_is_leased_after_pauses_that_grow(monkeypatch: pytest.MonkeyPatch):
    table, leases, pauses = table_of(joined()), list[str](), list[float]()
    table.leases_sparingly = True

    async def given_back(name: str, *_: Any, **options: Any) -> None:
        leases.append(name)
        if len(leases) == 8:
            del table.records[NODE.rank]

    async def sleep(duration: timedelta, **_: Any) -> None:
        pauses.append(duration.total_seconds())

    monkeypatch.setattr(workflow, "execute_activity", given_back)
    monkeypatch.setattr(workflow, "sleep", sleep)
    monkeypatch.setattr(workflow, "now", lambda: NOW)
    asyncio.run(hold_lease(table, NODE))
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert [type(one) for one in table.transitions.carried.waiting] == [NodeUnreachable]
