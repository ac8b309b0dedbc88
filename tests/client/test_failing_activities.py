"""Tests of activities that fail and are tried again: a job that waits for them says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowFailureError

from perdure.client.client import Client
from perdure.contract import JobPhase
from tests.support.command_line import CommandLine
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually
from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import running


async def test_a_cancelled_job_whose_cluster_is_gone_says_what_it_waits_for(
    temporal_client: TemporalClient, temporal_server: DevServer, tmp_path: Path
):
    commands = CommandLine(tmp_path, {**temporal_server.environment, "PERDURE_STATE": str(tmp_path), "COLUMNS": "200"})
    client = Client(temporal=temporal_client)
    async with running_fleet(temporal_client) as fleet:
        job = await submit(fleet, job_spec("2"))
        name = job.id.rpartition("/")[2]
        [group] = (await running(job, nodes=2)).groups
        assert await client.failing_activities(name) == ()
        fleet.away = "the cluster at 10.0.0.7:6379 does not answer"
        await job.cancel()

        async def fails() -> bool:
            return bool(await client.failing_activities(name))

        await eventually(fails, what="the deletion is known to fail")
        failing = (await client.failing_activities(name))[0]
        assert (failing.workflow_id, failing.activity_type, failing.cause) == (group, "delete_nodes", fleet.away)
        status = await asyncio.to_thread(commands.run, "status", name)
        assert status.code == 0, status.err
        [warning] = [line for line in status.out.splitlines() if "delete_nodes" in line]
        assert fleet.away in warning
        assert (await client.status(name)).phase is JobPhase.STOPPING
        fleet.away = ""
        with pytest.raises(WorkflowFailureError):
            await job.result()
        assert len(fleet.deleted) == 2
        assert await client.failing_activities(name) == ()
