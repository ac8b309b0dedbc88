"""Tests of jobs on a real server whose workers are away while the jobs wait for something."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.contract import JobPhase
from perdure.workflows.policy import outages
from tests.support.waiting import eventually
from tests.workflows.fleet import Fleet, job_spec, submit
from tests.workflows.jobs import running, until

LAG = timedelta(milliseconds=500)


async def fired_at(job: WorkflowHandle[Any, Any], timers: int) -> datetime | None:
    """When the job's timer after so many has fired."""
    fired = [
        event.event_time.ToDatetime(UTC)
        async for event in job.fetch_history_events()
        if event.HasField("timer_fired_event_attributes")
    ]
    return fired[timers] if len(fired) > timers else None


async def timers_of(job: WorkflowHandle[Any, Any]) -> int:
    return len([True async for event in job.fetch_history_events() if event.HasField("timer_fired_event_attributes")])


async def test_a_job_does_not_fail_for_a_node_that_came_while_no_worker_was_there(
    temporal_client: Client, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outages, "CONTROL_LAG", LAG)
    fleet = Fleet(temporal_client, f"perdure-{uuid4().hex[:8]}")
    try:
        main, watching = fleet.workers(max_cached_workflows=1000)
        async with main, watching:
            job = await submit(fleet, job_spec("2", recovery={"replace_timeout": "15s"}))
            await running(job, nodes=2)
            fleet.pending = {1: "no machine has room"}
            await fleet.lose(fleet.node(job.id, 1))
            await until(job, lambda s: "no machine has room" in s.next_action)
        before = await timers_of(job)
        end = await eventually(lambda: fired_at(job, before), what="the end of the job's wait")
        await eventually(lambda: datetime.now(UTC) - end > 2 * LAG)
        fleet.pending = {}
        await fleet.node(job.id, 1).start()
        main, watching = fleet.workers(max_cached_workflows=1000)
        async with main, watching:
            known = await running(job, nodes=2)
            assert known.phase is JobPhase.RUNNING
            await job.cancel()
            await until(job, lambda s: s.phase is JobPhase.CANCELLED)
    finally:
        await fleet.close()
