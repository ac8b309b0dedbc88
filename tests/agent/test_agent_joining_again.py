"""Tests of an agent whose group has ended: it joins the next group, and reports to the job that there was none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from temporalio.worker import Worker

from tests.agent.harness import recording, running_agent
from tests.agent.recorder import Recorder
from tests.support.temporal_server import DevServer


async def test_an_agent_joins_the_group_that_follows_a_terminated_one(
    temporal_server: DevServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("n")
    async with recording(temporal_server) as workflows, running_agent(temporal_server, workflows, folder) as agent:
        [first] = await workflows.expect(workflows.group, "joined")
        await agent.start_lease(1)
        await workflows.expect(workflows.group, "lease_taken")
        await workflows.group.terminate("by hand")
        [missing] = await workflows.expect(workflows.job, "group_missing")
        assert missing["sender"] == agent.node.model_dump()
        queue = f"again-{agent.node.uid}"
        async with Worker(workflows.client, task_queue=queue, workflows=[Recorder]):
            again = await workflows.client.start_workflow(Recorder.run, id=workflows.group.id, task_queue=queue)
            [second] = await workflows.expect(again, "joined")
            assert second["sequence"] > first["sequence"]
            assert second["agent_started_at"] == first["agent_started_at"]


async def test_a_lease_of_a_group_that_counts_leases_anew_is_held(
    temporal_server: DevServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("n")
    async with recording(temporal_server) as workflows, running_agent(temporal_server, workflows, folder) as agent:
        first = await agent.start_lease(epoch=5)
        await workflows.expect(workflows.group, "lease_taken")
        await workflows.group.terminate("by hand")
        await asyncio.gather(first, return_exceptions=True)
        queue = f"again-{agent.node.uid}"
        async with Worker(workflows.client, task_queue=queue, workflows=[Recorder]):
            workflows.group = await workflows.client.start_workflow(
                Recorder.run, id=workflows.group.id, task_queue=queue
            )
            second = await agent.start_lease(epoch=1)
            [taken] = await workflows.expect(workflows.group, "lease_taken")
            assert taken["epoch"] == 1
            await workflows.group.terminate("over")
            await asyncio.gather(second, return_exceptions=True)
