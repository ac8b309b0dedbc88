"""Trainings whose ranks differ, and whose world changes its size: statistics continue, experts wait for their world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.contract import JobPhase
from tests.support.waiting import eventually
from tests.system.made_steps import repeated, sized_steps, steps
from tests.system.site import PATIENCE, Job, Site

SCRIPT = Path(__file__).with_name("differing_values.py")


async def begin(site: Site, out: Path, kind: str, **spec: Any) -> Job:
    job = await site.submit(nodes="2:3", command=["torchrun", str(SCRIPT), kind, str(out)], **spec)
    job.out = out
    return job


async def stepped_as(job: Job, world_size: int) -> int:
    """Waits for some steps of a world; returns the newest."""
    newest = max(steps(job, 0), default=0)

    def enough() -> bool:
        made = [size for number, size in sized_steps(job, 0) if number > newest]
        return made[-5:] == [world_size] * 5

    await eventually(enough, within=PATIENCE)
    return steps(job, 0)[-1]


@pytest.mark.long("survival")
@pytest.mark.timeout(600)
async def test_the_statistics_of_a_batch_norm_continue_in_worlds_of_other_sizes(site: Site, tmp_path: Path):
    storage = {"storage": f"file://{tmp_path / 'storage'}", "every": 10}
    job = await begin(site, tmp_path / "out", "statistics", checkpoint=storage)
    await stepped_as(job, 3)
    job.signal(2, None)
    await stepped_as(job, 2)
    await stepped_as(job, 3)
    await job.client.scale(job.name, nodes="2")
    await stepped_as(job, 2)
    made = steps(job, 0)
    assert sorted(set(made)) == list(range(1, max(made) + 1))
    assert repeated(made) <= 2 * 3
    assert (await job.status()).phase is JobPhase.RUNNING


@pytest.mark.long("survival")
@pytest.mark.timeout(600)
async def test_a_world_that_cannot_have_the_experts_of_a_lost_one_waits_for_the_replacement(site: Site, tmp_path: Path):
    job = await begin(site, tmp_path / "out", "experts")
    await stepped_as(job, 3)
    job.signal(2, None)
    await stepped_as(job, 3)
    job.signal(1, None)
    await stepped_as(job, 3)
    made = sized_steps(job, 0)
    assert {size for _, size in made} == {3}
    assert repeated([number for number, _ in made]) <= 2 * 2
    texts = [one.text for incident in await job.incidents() for one in incident.evidence]
    assert any("expert differs between the 3 ranks that saved it" in text for text in texts)
    assert [incident.restored_step is not None for incident in await job.incidents()] == [True, True]
