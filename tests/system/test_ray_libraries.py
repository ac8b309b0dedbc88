"""Tests of scripts that use Ray's own libraries inside of a rank, on a real cluster."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ray import environment
from perdure.contract import JobPhase
from tests.support.waiting import eventually
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import ACTORS, KEYS, asked, submitted
from tests.system.site import Job, Site

PROGRAM = Path(__file__).with_name("ray_programs") / "uses_ray.py"
NODE, DATA = 1, 3
"""Processors of the job's node, and of what its script starts."""

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(1000)]


@pytest.fixture
async def cluster() -> AsyncIterator[RayCluster]:
    """A cluster whose interpreter has Ray's libraries."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder), machine_cpus=NODE + DATA, python=environment.ensure())
        try:
            yield cluster
        finally:
            await cluster.stop()


async def uses_ray(site: Site, cluster: RayCluster) -> Job:
    return await submitted(
        site, nodes="1", script=PROGRAM, command=[str(cluster.python), str(PROGRAM), str(site.folder)], out=site.folder
    )


def starts(folder: Path) -> list[dict[str, Any]]:
    """What each start of the script has found, once Ray's libraries have done their work."""
    path = folder / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_a_script_that_uses_ray_data_and_ray_train_works_and_again_after_its_rank_is_killed(
    cluster: RayCluster, ray_site: Site
):
    await cluster.start(machines=1)
    job = await uses_ray(ray_site, cluster)
    await eventually(lambda: len(starts(ray_site.folder)) == 1, what="the first start", within=400)
    os.kill(starts(ray_site.folder)[0]["pid"], 9)
    await eventually(lambda: len(starts(ray_site.folder)) == 2, what="the second start", within=400)
    job.finish()
    result = await ray_site.client.wait(job.name)
    assert (result.phase, result.restarts) == (JobPhase.SUCCEEDED, 1)
    expected = {"total": 200 * 199, "rows": 200}
    assert [start | expected for start in starts(ray_site.folder)] == starts(ray_site.folder)
    assert [start["generation"] for start in starts(ray_site.folder)] == [1, 2]
    # Its own actors and Ray's are in another namespace than those of nodes.
    assert "perdure" not in {start["namespace"] for start in starts(ray_site.folder)}
    await job.wound_down()
    assert not job.processes()
    # Ray Data's own actors are detached, and stay with the cluster.
    left = await asked(cluster, ACTORS)
    assert [one["name"] for one in left if one["namespace"] == "perdure"] == []
    assert await asked(cluster, KEYS) == []
