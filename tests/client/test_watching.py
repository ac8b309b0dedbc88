"""What one who waits for a late answer is told: that it is late, and after a while that none came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from uuid import uuid4

import pytest
from temporalio.client import Client as TemporalClient

from perdure.base.errors import ControlPlaneUnreachable, NoWorker
from perdure.cli import common
from perdure.client import watching
from perdure.client.client import Client
from perdure.contract.names import TRAINING_JOB, job_workflow_id


@pytest.fixture
async def unserved(temporal_client: TemporalClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The name of a job that no worker serves; who waits for it is told so soon."""
    monkeypatch.setattr(watching, "SLOW", timedelta(seconds=0.5))
    name = uuid4().hex
    workflow_id = job_workflow_id("default", name)
    await temporal_client.start_workflow(TRAINING_JOB, {}, id=workflow_id, task_queue=f"unserved-{name}")
    yield name
    await temporal_client.get_workflow_handle(workflow_id).terminate()


async def test_who_watches_is_told_that_the_answer_is_late_before_it_comes(
    temporal_client: TemporalClient, unserved: str
) -> None:
    snapshots = Client(temporal=temporal_client).watch(unserved)
    late = await anext(snapshots)
    assert "have not answered for seconds" in late.problem
    assert temporal_client.service_client.config.target_host in late.problem
    async for snapshot in snapshots:
        if snapshot.problem != late.problem:
            assert "no worker answers" in snapshot.problem
            break
    await snapshots.aclose()


async def test_a_command_that_shows_something_tells_what_it_waits_for(
    temporal_client: TemporalClient, unserved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client(temporal=temporal_client)
    with pytest.raises(NoWorker):
        await common.read_in_time(client, lambda client: client.status(unserved))
    address = temporal_client.service_client.config.target_host
    said = capsys.readouterr()
    assert f"waiting for {address} and its worker: no answer for " in said.err
    assert not said.out, "that is for the result"


async def test_a_command_that_shows_something_ends_when_no_answer_comes(
    temporal_client: TemporalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "SLOW", timedelta(seconds=0.1))
    monkeypatch.setattr(common, "READ_TIMEOUT", timedelta(seconds=0.3))
    with pytest.raises(ControlPlaneUnreachable, match="no answer within"):
        await common.read_in_time(Client(temporal=temporal_client), lambda _: asyncio.Event().wait())
