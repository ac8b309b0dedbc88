"""Trains the jobs of the examples' specifications, with fewer steps."""

from __future__ import annotations

import shutil
from typing import Any
from uuid import uuid4

import pytest
import yaml

from perdure.contract import JobPhase
from tests.support.allocation import REPOSITORY
from tests.system.site import Job, Site


@pytest.mark.parametrize(
    ("example", "out"), [("01-first-job/minimal.yaml", "out"), ("02-elastic-job/elastic.yaml", "out/{name}")]
)
@pytest.mark.long("frameworks")
async def test_the_job_of_an_example_trains_to_its_end(site: Site, example: str, out: str) -> None:
    # A copy, since scripts write into the folder that they run in.
    shutil.copytree(REPOSITORY / "examples", site.folder / "examples")
    path = site.folder / "examples" / example
    job: dict[str, Any] = yaml.safe_load(path.read_text())
    job["name"] = name = f"{job['name']}-{uuid4().hex[:8]}"
    job["roles"]["worker"]["command"] += ["--steps", "20"]
    path.write_text(yaml.safe_dump(job))
    await site.client.submit(path)
    site.jobs.append(Job(site.client, name, (await site.client.status(name)).uid, site.folder))
    ended = await site.client.wait(name)
    assert (ended.phase, ended.restarts) == (JobPhase.SUCCEEDED, 0)
    checkpoint = site.folder / "examples" / "01-first-job" / out.format(name=name) / "checkpoint.pt"
    assert checkpoint.stat().st_size
