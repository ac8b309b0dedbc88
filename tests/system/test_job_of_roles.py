"""Tests of a real job of several roles: an initializer, two servers, a follower, and a training over torchrun."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.demo.learning import free_ports
from perdure.cli.explain import explanation, with_role_named
from perdure.contract import JobPhase, JobStatus
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, SCRIPT, Job, Site

PROGRAMS = Path(__file__).with_name("role_programs.py")


async def job_of_roles(site: Site) -> Job:
    out = site.folder / "roles"
    out.mkdir()

    def program(name: str, nodes: int, **fields: Any) -> dict[str, Any]:
        return {"nodes": nodes, "command": [sys.executable, str(PROGRAMS), name, str(out)], **fields}

    return await site.submit(
        out=out,
        recovery={"warm_starts": False},
        roles={
            "trainer": {
                "nodes": 2,
                "command": ["torchrun", str(SCRIPT), str(out)],
                "depends_on": {"ps": "ready"},
            },
            "ps": program("serve", 2, ready={"port": free_ports(2)}, depends_on={"init": "completed"}),
            "init": program("prepare", 1),
            "follower": program("follow", 1, depends_on={"ps": "ready"}, on_failure="ignore"),
        },
    )


def notes(job: Job, kind: str) -> list[list[str]]:
    path = job.out / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[2:] for line in lines if line.split()[1] == kind]


async def phase(job: Job, role: str) -> tuple[JobPhase, int]:
    status: JobStatus = await job.client.status(job.name, role=role)
    (of_role,) = [one for one in status.by_role if one.name == role]
    return of_role.phase, of_role.generation


async def generations(job: Job) -> dict[str, int]:
    return {one.name: one.generation for one in (await job.status()).by_role}


@pytest.mark.long("roles")
async def test_each_role_is_repaired_alone_and_the_training_ends_the_job(site: Site):
    job = await job_of_roles(site)
    await job.stepping(generation=1, ranks=2)
    started = await generations(job)
    assert started == {"trainer": 1, "ps": 1, "init": 1, "follower": 1}
    assert (await phase(job, "init"))[0] is JobPhase.SUCCEEDED
    await eventually(lambda: len(notes(job, "follow")) == 1, what="the follower")
    ((_, addresses, _),) = notes(job, "follow")
    servers = {rank: int(pid) for rank, pid in notes(job, "serve")}
    trained = {step.pid for step in job.steps()}

    # A server is killed: the other one, its address, and all other roles stay.
    os.kill(servers["0"], signal.SIGKILL)
    await eventually(lambda: len(notes(job, "serve")) == 3, what="the server again")
    await job.until(lambda s: all(one.phase in (JobPhase.RUNNING, JobPhase.SUCCEEDED) for one in s.by_role))
    assert psutil.pid_exists(servers["1"])
    assert await generations(job) == started | {"ps": 2}
    await eventually(lambda: notes(job, "saw")[-1] == ["2", "True", addresses], what=lambda: str(notes(job, "saw")))
    assert {step.pid for step in job.steps()} == trained

    # A rank of the training is killed, and a whole node of it.
    os.kill(next(step.pid for step in job.steps() if step.rank == 0), signal.SIGKILL)
    await job.stepping(generation=2, ranks=2)
    assert await generations(job) == started | {"ps": 2, "trainer": 2}

    # The follower is killed.
    os.kill(int(notes(job, "follow")[0][0]), signal.SIGKILL)
    await eventually(lambda: len(notes(job, "follow")) == 2, what="the follower again")
    assert await generations(job) == started | {"ps": 2, "trainer": 2, "follower": 2}
    assert len(notes(job, "serve")) == 3

    last = with_role_named((await job.incidents())[-1])
    assert explanation(last, job=job.name, flag="", several_roles=True).plain.startswith("#3 follower: ")

    job.finish()
    result = await site.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    assert [incident.role for incident in await job.incidents()] == ["ps", "trainer", "follower"]
    await job.ended()


@pytest.mark.long("roles")
async def test_nothing_of_a_job_of_several_roles_is_left_after_its_worker_was_killed(own_site: Site):
    job = await job_of_roles(own_site)
    await job.stepping(generation=1, ranks=2)
    await own_site.control_plane.stop_worker()
    job.finish()
    trained = {step.pid for step in job.steps()}
    await eventually(lambda: not any(map(psutil.pid_exists, trained)), what="the end of the training")
    await own_site.start()
    async with asyncio.timeout(PATIENCE):
        assert (await own_site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    await job.ended()
