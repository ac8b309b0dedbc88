"""Tests of how long a group waits for an agent to take a command: it may poll late, while its lease holds."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio import workflow
from temporalio.exceptions import ActivityError, TimeoutError, TimeoutType

from perdure.contract import (
    CommandAnswer,
    DesiredNode,
    GroupDesire,
    Member,
    NodeCredentials,
    World,
)
from perdure.contract.transitions import AnyTransition, NodeUnresponsive
from perdure.spec.validate import parse_spec
from perdure.workflows import agent_calls, options
from perdure.workflows.node_record import GroupInput, NodeRecord
from perdure.workflows.node_table import NodeTable
from tests.workflows.fleet import job_spec

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NODE = NodeCredentials(uid="0123abcd", role="worker", rank=0, incarnation=1, token="token")
TIMING = parse_spec(job_spec("1")).timing
FIRST, LEASE = TIMING.commands.schedule_to_start, TIMING.lease.timeout


def table_of(record: NodeRecord) -> NodeTable:
    spec = job_spec("1")
    member = Member(incarnation=1, group_rank=0, base_rank=0, processes=1)
    world = World(generation=2, members={0: member}, store_address="127.0.0.1", store_port=1, store_rank=0)
    desire = GroupDesire(version=1, nodes={0: DesiredNode(incarnation=1, token=NODE.token)}, world=world)
    table = NodeTable(
        GroupInput(
            job_id=f"job/default/{spec['name']}",
            job_first_run_id="run",
            uid=NODE.uid,
            group=0,
            role="worker",
            spec=parse_spec(spec),
            desire=desire,
        )
    )
    table.put(record)
    return table


class LateAgent:
    """Stands for the server's queue, in which no agent takes the first commands in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, table: NodeTable, *, misses: int) -> None:
        self._table = table
        self._misses = misses
        self.waits: list[timedelta] = []
        """The time that each command was to wait."""
        self.told: list[list[type[AnyTransition]]] = []
        """What the group had told the job before each command."""
        monkeypatch.setattr(workflow, "execute_activity", self._execute)
        monkeypatch.setattr(workflow, "now", lambda: NOW)

    async def _execute(self, name: str, argument: Any, *, schedule_to_start_timeout: timedelta, **_: Any) -> Any:
        self.waits.append(schedule_to_start_timeout)
        self.told.append([type(transition) for transition in self._table.transitions.carried.waiting])
        if len(self.waits) > self._misses:
            return CommandAnswer(accepted=True, generation=2, entered=0)
        error = ActivityError(
            "not taken",
            scheduled_event_id=1,
            started_event_id=0,
            identity="",
            activity_type=name,
            activity_id="1",
            retry_state=None,
        )
        raise error from TimeoutError("", type=TimeoutType.SCHEDULE_TO_START, last_heartbeat_details=[])


@pytest.mark.parametrize(
    ("reachable", "misses", "waits", "unresponsive"),
    [
        pytest.param(True, 1, [FIRST, LEASE], 0, id="its lease holds and it takes the next one"),
        pytest.param(True, 2, [FIRST, LEASE, options.PATIENT_COMMAND], 1, id="its lease holds and it takes none"),
        pytest.param(False, 1, [FIRST, options.PATIENT_COMMAND], 1, id="its lease has lapsed"),
    ],
)
def test_a_node_whose_lease_holds_may_take_a_command_late(
    monkeypatch: pytest.MonkeyPatch, reachable: bool, misses: int, waits: list[timedelta], unresponsive: int
) -> None:
    table = table_of(NodeRecord(node=NODE, since=NOW, joined=True, reachable=reachable))
    agent = LateAgent(monkeypatch, table, misses=misses)
    asyncio.run(agent_calls.apply_world(table, NODE, 2))
    assert agent.waits == waits
    assert agent.told[-1].count(NodeUnresponsive) == unresponsive
