"""Planned changes of a training whose state is split over its ranks: no step is made twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.contract import JobPhase
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.kept_states import keep_states
from tests.system.made_steps import sized_steps, steps
from tests.system.site import PATIENCE, Job, Site

SHARDED = REPOSITORY / "examples" / "04-checkpoints" / "sharded.py"


async def known_to_step(job: Job, *, nodes: int) -> None:
    """Waits until the job knows that all ranks of a world step: before that its changes are made at once."""
    unseen = "no step was seen on every node yet"
    await job.until(
        lambda status: status.phase is JobPhase.RUNNING and status.nodes == nodes and unseen not in status.reason
    )


async def stepped_as(job: Job, world_size: int, *, beyond: int = 0) -> int:
    """Waits for some steps of a world, and until the job knows that it makes them; returns the newest."""

    def enough() -> bool:
        return [size for number, size in sized_steps(job, 0) if number > beyond][-5:] == [world_size] * 5

    await eventually(enough, within=PATIENCE)
    await known_to_step(job, nodes=world_size)
    return steps(job, 0)[-1]


@pytest.mark.long("survival")
@pytest.mark.timeout(600)
async def test_a_split_state_that_shrinks_grows_and_moves_by_request_makes_no_step_twice(site: Site, tmp_path: Path):
    """Its steps are faster than the copies of them."""
    out = tmp_path / "out"
    job = await site.submit(
        nodes="3", command=["torchrun", str(SHARDED), "--steps", "1000000", "--pause", "0.02", "--out", str(out)]
    )
    job.out = out
    newest = await stepped_as(job, 3)
    await job.client.scale(job.name, nodes="2")
    newest = await stepped_as(job, 2, beyond=newest)
    await job.client.scale(job.name, nodes="3")
    newest = await stepped_as(job, 3, beyond=newest)
    generation = (await job.status()).generation
    await job.client.relaunch_node(job.name, 1)
    await job.running(nodes=3, after=generation)
    await stepped_as(job, 3, beyond=steps(job, 0)[-1])
    sizes = sized_steps(job, 0)
    made = [number for number, _ in sizes]
    assert sorted(set(made)) == list(range(1, max(made) + 1))
    again = [
        (sizes[index - 1], sizes[index]) for index in range(1, len(sizes)) if sizes[index][0] <= sizes[index - 1][0]
    ]
    told = [[e.text for e in one.evidence] for one in await job.incidents()]
    assert again == [], told
    texts = [one.text for incident in await job.incidents() for one in incident.evidence]
    assert sum("no step is lost" in text for text in texts) == 3


@pytest.mark.long("survival")
@pytest.mark.timeout(600)
async def test_a_split_state_and_a_replicated_one_of_a_script_continue_together_after_planned_changes(site: Site):
    kept = await keep_states(site, "split", "replicated", nodes="3")
    await kept.stepping(world_size=3)
    begun = kept.generation
    for nodes in (2, 3):
        await known_to_step(kept.job, nodes=5 - nodes)
        await kept.job.client.scale(kept.job.name, nodes=str(nodes))
        await kept.stepping(world_size=nodes)
        assert kept.restored()["split"] == kept.restored()["replicated"]
    assert kept.lost(since=begun) == {"split": 0, "replicated": 0}
    texts = [one.text for incident in await kept.job.incidents() for one in incident.evidence]
    assert sum("no step is lost" in text for text in texts) == 2, texts


@pytest.mark.long("survival")
@pytest.mark.timeout(600)
async def test_states_of_a_job_that_is_suspended_and_resumed_continue_at_the_next_step(site: Site):
    """Whether or not they are split; the storage has nothing else."""
    storage = {"storage": f"file://{site.folder / 'storage'}", "every": 1_000_000}
    kept = await keep_states(site, "split", "replicated", nodes="3", checkpoint=storage)
    await kept.stepping(world_size=3)
    begun = kept.generation
    for _ in range(2):
        await known_to_step(kept.job, nodes=3)
        await kept.job.client.suspend(kept.job.name)
        await kept.job.until(lambda status: status.phase is JobPhase.SUSPENDED)
        await kept.job.ended()
        await kept.job.client.resume(kept.job.name)
        await kept.stepping(world_size=3)
    assert kept.lost(since=begun) == {"split": 0, "replicated": 0}
    texts = [one.text for incident in await kept.job.incidents() for one in incident.evidence]
    assert sum("is durable: all ranks waited at it, and no step is lost" in text for text in texts) == 2, texts
