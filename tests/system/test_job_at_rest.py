"""Tests that a job at rest adds nothing to any history: what agents know travels with their leases."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from tests.system.site import PATIENCE, Site

REST = 60.0
"""Seconds without an event, longer than the pause between two reports of any kind. As long after their first steps
agents have reported how fast these are."""


@pytest.mark.long("survival")
async def test_the_histories_of_a_job_and_its_groups_come_to_rest(site: Site):
    """The steps are so long that what else this machine does changes their times by little; agents report changes."""
    job = await site.submit("--pause", "0.4")
    known = await job.running(nodes=2)
    await job.stepping(generation=known.generation, ranks=2)
    client = await site.client.connect()
    workflows = (job.workflow_id, *known.groups)
    seen = added = Counter[str]()
    try:
        async with asyncio.timeout(3 * PATIENCE):
            while not seen or added:
                await job.undisturbed(ranks=2, seconds=REST)
                known_before, seen = seen, await _events(client, *workflows)
                added = seen - known_before
    except TimeoutError:
        raise AssertionError(f"at rest, in {REST:.0f} s: {added}") from None
    assert not await job.incidents()


async def _events(client: Client, *workflows: str) -> Counter[str]:
    """The kinds of events in the histories, signals by their names."""
    return Counter(
        [
            f"{event.workflow_execution_signaled_event_attributes.signal_name or EventType.Name(event.event_type)}"
            for workflow in workflows
            async for event in client.get_workflow_handle(workflow).fetch_history_events()
        ]
    )
