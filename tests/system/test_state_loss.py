"""Whole jobs whose storage is not mounted when they are resumed: they wait and name it, and lose no step unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.contract import JobPhase, RestoreSource
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.made_steps import steps
from tests.system.site import PATIENCE, Job, Site

EXAMPLE = REPOSITORY / "examples" / "04-checkpoints" / "plain.py"


async def resumed_without_storage(site: Site, folder: Path) -> tuple[Job, int, int]:
    """A job whose storage was moved away while it was suspended; its durable step, and how many steps it had made."""
    out, storage = folder / "out", folder / "storage"
    job = await site.submit(
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
        checkpoint={"storage": f"file://{storage}", "every": 20, "keep_last": 2},
    )
    job.out = out
    await job.until(lambda status: status.checkpoint.step is not None)
    await site.client.suspend(job.name)
    await job.until(lambda status: status.phase is JobPhase.SUSPENDED)
    await job.ended()
    durable = (await job.status()).checkpoint.step
    assert durable is not None
    made = len(steps(job, 0))
    storage.rename(folder / "unmounted")
    storage.mkdir()
    await site.client.resume(job.name)
    known = await job.until(lambda status: any("is stored" in warning for warning in status.warnings))
    [warning] = [warning for warning in known.warnings if "is stored" in warning]
    assert f"file://{storage}" in warning
    assert f"perdure restart {job.name} --older" in warning
    assert len(steps(job, 0)) == made, "no step is made below the one that existed"
    return job, durable, made


@pytest.mark.long("storage")
async def test_a_storage_that_comes_back_is_continued_from_without_a_restart(site: Site, tmp_path: Path):
    job, durable, made = await resumed_without_storage(site, tmp_path)
    before = (await job.status()).generation
    (tmp_path / "unmounted").rename(tmp_path / "storage")
    known = await job.until(lambda status: status.checkpoint.restored_from is RestoreSource.STORAGE)
    assert known.generation == before
    assert (known.checkpoint.restored_step or 0) >= durable
    await eventually(lambda: steps(job, 0)[made:], within=PATIENCE)
    assert steps(job, 0)[made] == (known.checkpoint.restored_step or 0) + 1
    await job.until(lambda status: not status.warnings)
    await site.client.cancel(job.name)
    await job.ended()


@pytest.mark.long("storage")
async def test_a_user_who_takes_the_older_state_sees_what_it_costs(site: Site, tmp_path: Path):
    job, durable, made = await resumed_without_storage(site, tmp_path)
    await site.client.restart(job.name, older=True)
    await eventually(lambda: steps(job, 0)[made:], within=PATIENCE)
    assert steps(job, 0)[made] == 1
    known = await job.until(lambda status: status.checkpoint.restored_generation == status.generation)
    assert known.checkpoint.restored_from is RestoreSource.NOTHING
    assert known.checkpoint.restored_step == 0
    titles = [one.title for one in await job.incidents() if one.observation is not None and one.observation.lost_state]
    assert len(titles) == 1
    assert titles[0].startswith("no saved state was loaded, although step")
    kept = sorted(path.parent.name for path in (tmp_path / "unmounted").glob("step-*/.metadata"))
    assert any(name.startswith(f"step-{durable}-") for name in kept)
    await site.client.cancel(job.name)
    await job.ended()
