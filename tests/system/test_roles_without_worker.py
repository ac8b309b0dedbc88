"""Test of a job of several roles whose worker is killed at random moments while the job starts, recovers and ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter

import psutil
import pytest

from perdure.contract import JobPhase
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site
from tests.system.test_job_of_roles import generations, job_of_roles, notes

ROUNDS = 6
LONGEST_WAIT = 1.5
"""Seconds from a fault to the kill of the worker, in which a repair of one process ends on a machine that is not
busy."""


def incarnations(job: Job) -> Counter[str]:
    """How many incarnations of each node have processes."""
    nodes: set[str] = set()
    for process in job.processes():
        try:
            nodes.add(process.environ()["PERDURE_NODE"])
        except psutil.Error:
            continue
    return Counter(node.rpartition("/")[0] for node in nodes)


def victim(job: Job, role: str) -> int:
    """The newest process of a role that is to be killed."""
    match role:
        case "trainer":
            return next(step.pid for step in reversed(job.steps()) if step.rank == 0)
        case "ps":
            return int([pid for rank, pid in notes(job, "serve") if rank == "1"][-1])
        case _:
            return int(notes(job, "follow")[-1][0])


async def worker_dies_and_returns(site: Site, chance: random.Random) -> None:
    await asyncio.sleep(chance.uniform(0, LONGEST_WAIT))
    site.control_plane.kill_worker()
    await asyncio.sleep(chance.uniform(0, LONGEST_WAIT))
    await site.start()


@pytest.mark.long("roles")
@pytest.mark.timeout(440)
@pytest.mark.parametrize("seed", [1])
async def test_each_role_recovers_alone_and_once_though_the_worker_is_killed_at_any_moment(own_site: Site, seed: int):
    chance = random.Random(seed)
    job = await job_of_roles(own_site)
    # While the roles start one after another.
    await worker_dies_and_returns(own_site, chance)
    await job.stepping(generation=1, ranks=2)
    await eventually(lambda: len(notes(job, "follow")) == 1, what="the follower")
    expected = {"trainer": 1, "ps": 1, "init": 1, "follower": 1}
    assert await generations(job) == expected
    for round in range(ROUNDS):
        role = chance.choice(("trainer", "ps", "follower"))
        print(f"round {round}: {role}")
        os.kill(victim(job, role), signal.SIGKILL)
        await worker_dies_and_returns(own_site, chance)
        expected[role] += 1

        async def repaired() -> bool:
            status = await job.status()
            works = all(one.phase in (JobPhase.RUNNING, JobPhase.SUCCEEDED) for one in status.by_role)
            return works and await generations(job) == expected

        await eventually(repaired, within=PATIENCE, what=f"{role} in {expected}")
        await job.stepping(generation=expected["trainer"], ranks=2)
        # The initializer's node is gone; all others are there once.
        alive = incarnations(job)
        assert alive == {f"{job.uid}/{node}": 1 for node in ("trainer-0", "trainer-1", "ps-0", "ps-1", "follower-0")}, (
            alive
        )
        assert len(notes(job, "serve")) == 1 + expected["ps"]
        assert len(notes(job, "follow")) == expected["follower"]
    assert len(notes(job, "prepare")) == 1, "what has completed is not done again"
    # While the job ends.
    job.finish()
    await worker_dies_and_returns(own_site, chance)
    async with asyncio.timeout(PATIENCE):
        assert (await own_site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    assert Counter(incident.role for incident in await job.incidents()) == Counter(
        {role: count - 1 for role, count in expected.items() if count > 1}
    )
    await job.ended()
