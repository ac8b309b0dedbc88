"""Tests of jobs on a real server with overlapping faults: each trains again with all its nodes, within bounded time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.contract import JobPhase, JobStatus
from tests.workflows.adverse_site import FAULTS, AdverseSite, adverse_site
from tests.workflows.fleet import job_spec, submit
from tests.workflows.jobs import status, until

BOUND = 60.0
"""Seconds from the last fault; a few are usual."""

SPEC: dict[str, Any] = {
    "timing": {
        "lease": {"heartbeat": "500ms", "timeout": "2s", "schedule_to_start": "2s"},
        "rendezvous": {"last_call": "200ms", "victim_grace": "300ms", "enter_timeout": "2s"},
        "commands": {"schedule_to_start": "2s"},
        "processes": {"presumed_gone": "3s"},
        "owner_check": "1s",
    },
    "limits": {"termination_grace_period": "1s"},
    "retry": {"max_restarts": 1000, "no_progress_limit": 1000},
}


async def trains(site: AdverseSite, job: WorkflowHandle[Any, Any], nodes: int) -> None:
    """Waits until the job says that it runs with so many nodes, and they do step."""
    known: JobStatus | None = None
    try:
        async with asyncio.timeout(BOUND):
            while known is None or not site.trains(nodes):
                await site.until(lambda: site.trains(nodes))
                known = await until(job, lambda s: s.phase is JobPhase.RUNNING and s.nodes == nodes, within=BOUND)
    except (TimeoutError, AssertionError):
        raise AssertionError(site.story(known)) from None


@pytest.mark.parametrize(
    ("seed", "nodes", "cached"),
    [
        pytest.param(4, "2:3", 0, marks=pytest.mark.long("workflows")),
        (5, "2", 1000),
        pytest.param(6, "2:3", 1000, marks=pytest.mark.long("workflows")),
        pytest.param(8, "2", 0, marks=pytest.mark.long("workflows")),
        pytest.param(13, "2:3", 1000, marks=pytest.mark.long("workflows")),
    ],
)
async def test_a_job_trains_again(seed: int, nodes: str, cached: int, temporal_client: Client) -> None:
    chance = random.Random(seed)
    most = int(nodes.rpartition(":")[2])
    async with adverse_site(temporal_client, chance, max_cached_workflows=cached) as site:
        job = await submit(site, job_spec(nodes, **SPEC))
        await trains(site, job, most)
        for _ in range(chance.randint(6, 10)):
            await site.inflict(chance.choice(FAULTS))
            # Faults come when they come, and do not wait for a repair.
            await asyncio.sleep(chance.choice((0.0, 0.1, 0.5, 1.0)))
        await site.mend()
        await trains(site, job, most)
        groups = (await status(job)).groups
        for node in site.training_nodes:
            node.finish()
        async with asyncio.timeout(BOUND):
            result = await job.result()
            assert result["phase"] == JobPhase.SUCCEEDED
            for group in groups:
                await site.client.get_workflow_handle(group).result()
            # One that no group came to know leaves by itself: its agent learns that the job has closed.
            await site.until(lambda: not site.training_nodes)
