"""Test of examples/12-several-roles: it runs to its end, and each of its parts is killed."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import pytest
import yaml

from examples.demo.faults import kill_node, kill_rank
from examples.demo.learning import free_ports
from perdure.contract import JobPhase, JobStatus
from tests.support.allocation import REPOSITORY
from tests.system.site import Job, Site

EXAMPLE = REPOSITORY / "examples" / "12-several-roles"
WITHIN = 240.0
VICTIMS = [(role, whole_node) for role in ("ps", "evaluator", "trainer") for whole_node in (False, True)]


async def submitted(site: Site, *, steps: int) -> Job:
    spec: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    spec["name"] = f"{spec['name']}-{uuid4().hex[:8]}"
    spec["workdir"] = {"path": str(EXAMPLE)}
    spec["env"] = {"STEPS": str(steps), "PYTHONDONTWRITEBYTECODE": "1"}
    spec["roles"]["ps"]["ready"]["port"] = free_ports(2)
    await site.client.submit(spec)
    job = Job(site.client, spec["name"], (await site.client.status(spec["name"])).uid, site.folder)
    site.jobs.append(job)
    return job


@pytest.mark.long("roles")
@pytest.mark.timeout(440)
async def test_the_example_of_several_roles_ends_and_each_of_its_parts_is_repaired_alone(site: Site) -> None:
    short = await submitted(site, steps=5)
    result = await site.client.wait(short.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 0)
    await short.ended()

    job = await submitted(site, steps=1_000_000)

    def works(status: JobStatus, expected: dict[str, int]) -> bool:
        return all(
            one.generation == expected[one.name]
            and one.phase is (JobPhase.SUCCEEDED if one.name == "init" else JobPhase.RUNNING)
            for one in status.by_role
        )

    expected = {"init": 1, "ps": 1, "trainer": 1, "evaluator": 1}
    await job.until(lambda status: works(status, expected), within=WITHIN)
    seconds: dict[str, float] = {}
    for role, whole_node in VICTIMS:
        began = time.monotonic()
        (kill_node if whole_node else kill_rank)(job.uid, role, 0)
        expected[role] += 1
        await job.until(lambda status: works(status, expected), within=WITHIN)
        seconds[f"{role} {'node' if whole_node else 'process'}"] = round(time.monotonic() - began, 1)
    print(f"seconds until all roles run: {seconds}")
    assert {incident.role for incident in await job.incidents()} == {"ps", "evaluator", "trainer"}
