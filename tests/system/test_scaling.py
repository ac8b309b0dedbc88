"""A real job that chooses its number of nodes by its speed, and keeps it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.contract import JobStatus
from tests.support.command_line import CommandLine
from tests.support.waiting import eventually
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("scaled.py")


async def scaled(site: Site, *, compute: float, exchange: float) -> Job:
    command = ["torchrun", str(SCRIPT), "--compute", str(compute), "--exchange", str(exchange)]
    scaling = {"policy": "efficient", "batch": "global", "settle": "4s", "min_efficiency": 0.29}
    return await site.submit(roles={"worker": {"nodes": "1:4", "command": command, "scaling": scaling}})


async def chosen(job: Job, nodes: int) -> JobStatus:
    """The status of the job once it trains with this number of nodes, and keeps it."""

    status: Any = None

    async def found() -> JobStatus | None:
        nonlocal status
        status = await job.status()
        assert status.scaling is not None
        keeps = status.scaling.chosen == status.nodes == status.nodes_max == nodes
        measured = {pace.generation for pace in status.scaling.paces}
        return status if keeps and status.generation in measured else None

    return await eventually(found, within=2 * PATIENCE, what=lambda: f"{status}")


@pytest.mark.long("survival")
@pytest.mark.timeout(400)
async def test_a_job_keeps_the_nodes_that_pay_and_obeys_its_user(site: Site) -> None:
    # The second node adds 0.33 of what the first one does, the third 0.25 of a node's share.
    job = await scaled(site, compute=0.25, exchange=0.25)
    status = await chosen(job, 2)
    view: Any = status.scaling
    measured = {pace.nodes: pace.step for pace in view.paces}
    assert measured[4] == pytest.approx(0.3125, rel=0.3)
    assert measured[2] == pytest.approx(0.375, rel=0.3)
    assert [resized.after for resized in view.resized] == [2]
    [incident] = await job.incidents()
    assert incident.stepping_at is not None
    assert "to measure the speed with 2 nodes" in incident.title

    # A million steps take 4 to 6 days: all nodes are too few for an hour, and one is enough for a month.
    command_line = CommandLine.local(site.folder, site.state.path)
    for within, nodes in (("1h", 4), ("30d", 1)):
        would = await _said(command_line, "scale", job.name, "--finish-by", within, "--dry-run")
        assert f"it would choose {nodes} node" in would
        assert (await job.status()).goal == status.goal
        told = await _said(command_line, "scale", job.name, "--finish-by", within, "--reason", "the review")
        assert "finish_by 20" in told
        status = await eventually(partial(_trains_with, job, nodes), within=2 * PATIENCE)
    told = await _said(command_line, "explain", job.name)
    assert "a user has changed scaling: the review: policy deadline instead of efficient" in told
    assert "no number of nodes surely finishes by" in told

    await job.client.scale(job.name, "4")
    status = await eventually(lambda: _trains_with(job, 4), within=PATIENCE)
    assert status.scaling is not None
    assert (status.scaling.fewest, status.scaling.largest) == (4, 4)


async def _said(command_line: CommandLine, *arguments: str) -> str:
    done = await asyncio.to_thread(command_line.run, *arguments)
    assert done.code == 0, done
    return done.out


async def _trains_with(job: Job, nodes: int) -> JobStatus | None:
    status = await job.status()
    return status if status.nodes == nodes else None
