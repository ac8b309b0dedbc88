"""Tests of activities that fail and are tried again: a job that waits for them says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from temporalio.client import Client as TemporalClient
from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError, RPCStatusCode

from perdure.client.client import Client
from perdure.contract import JobPhase, JobStatus
from tests.support.command_line import CommandLine
from tests.support.temporal_server import DevServer
from tests.support.waiting import eventually
from tests.workflows.fleet import job_spec, running_fleet, submit
from tests.workflows.jobs import running


class Listed(NamedTuple):
    calls: int
    causes: list[str]


async def lists(client: Client, status: JobStatus, patch: pytest.MonkeyPatch, *, refused: bool) -> Listed:
    """What keeps a job waiting, and how often the server was asked for lists, which it may refuse."""
    service = (await client.connect()).workflow_service
    list_them, calls = service.list_workflow_executions, 0

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if refused:
            raise RPCError("namespace rate limit exceeded", RPCStatusCode.RESOURCE_EXHAUSTED, b"")
        return await list_them(*arguments, **options)

    with patch.context() as patched:
        patched.setattr(service, "list_workflow_executions", counted)
        _, _, failing = await client.troubles(status)
    return Listed(calls, [one.cause for one in failing])


@pytest.mark.long("workflows")
async def test_a_cancelled_job_whose_cluster_is_gone_says_what_it_waits_for(
    temporal_client: TemporalClient, temporal_server: DevServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        listed = await lists(client, await client.status(name), monkeypatch, refused=False)
        assert listed == (1, [fleet.away])
        listed = await lists(client, await client.status(name), monkeypatch, refused=True)
        assert listed == (1, [fleet.away])
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
