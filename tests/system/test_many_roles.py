"""Test of a job of eight roles and 64 real nodes, whose processes are light: it starts in order, and ends."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from examples.demo.learning import free_ports
from perdure.contract import JobPhase
from tests.support.waiting import eventually
from tests.system.site import WALK, Job, Site
from tests.system.test_job_of_roles import PROGRAMS

SERVICES = {"ps": 8, "reward": 8, "rollout": 8, "inference": 8}
FOLLOWERS = {"evaluator": 8, "dashboard": 7}
TRAINERS = 16
WITHIN = 300.0
"""Seconds for the start of 64 agents and launchers, each of which takes about a second of a processor."""


def started(job: Job) -> dict[str, list[float]]:
    """The times at which the processes of each kind were started."""
    path = job.out / "notes"
    found: dict[str, list[float]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        time, kind, *_ = line.split()
        found.setdefault(kind, []).append(float(time))
    return found


@pytest.mark.long("roles")
@pytest.mark.timeout(440)
async def test_eight_roles_of_64_nodes_start_in_the_order_of_their_dependencies_and_end(own_site: Site) -> None:
    out = own_site.folder / "many"
    out.mkdir()

    def program(name: str, nodes: int, **fields: Any) -> dict[str, Any]:
        return {"nodes": nodes, "command": [sys.executable, str(PROGRAMS), name, str(out)], **fields}

    first = free_ports(sum(SERVICES.values()))
    ports = {name: first + 8 * number for number, name in enumerate(SERVICES)}
    roles = {
        "trainer": {
            "nodes": TRAINERS,
            "command": [sys.executable, str(WALK), str(out)],
            "depends_on": dict.fromkeys(SERVICES, "ready"),
        },
        **{
            name: program("serve", nodes, ready={"port": ports[name]}, depends_on={"init": "completed"})
            for name, nodes in SERVICES.items()
        },
        "init": program("prepare", 1),
        **{
            name: program("wait", nodes, depends_on={"trainer": "ready"}, on_failure="ignore")
            for name, nodes in FOLLOWERS.items()
        },
    }
    assert len(roles) == 8
    assert sum(int(str(role["nodes"])) for role in roles.values()) == 64
    job = await own_site.submit(out=out, recovery={"warm_starts": False}, roles=roles)
    await job.until(lambda status: all(one.generation for one in status.by_role), within=WITHIN)
    await job.stepping(generation=1, ranks=TRAINERS)
    await eventually(
        lambda: len(started(job).get("wait", ())) == sum(FOLLOWERS.values()), within=WITHIN, what="the followers"
    )
    times = started(job)
    assert {kind: len(found) for kind, found in times.items()} == {"prepare": 1, "serve": 32, "wait": 15}
    assert max(times["prepare"]) < min(times["serve"])
    steps = [step.time for step in job.steps()]
    assert max(times["serve"]) < min(steps)
    assert max(times["serve"]) < min(times["wait"])
    status = await job.status()
    assert [(one.name, one.generation) for one in status.by_role if one.generation != 1] == []
    print(f"from the first process to the last one: {max(times['wait']) - min(times['prepare']):.0f} s")

    job.finish()
    result = await own_site.client.wait(job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 0)
    await job.ended()
