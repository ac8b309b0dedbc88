"""Whole jobs whose stored checkpoints are all damaged: they stop and name each, or start over, and delete none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import JobPhase
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.made_steps import steps
from tests.system.site import PATIENCE, Job, Site

EXAMPLE = REPOSITORY / "examples" / "04-checkpoints" / "plain.py"


async def train(site: Site, folder: Path, **checkpoint: Any) -> Job:
    """Starts a training that stores a checkpoint only where one is requested."""
    out = folder / "out"
    job = await site.submit(
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
        checkpoint={"storage": f"file://{folder / 'storage'}", "every": 1_000_000, "keep_last": 2, **checkpoint},
    )
    job.out = out
    return job


async def store(job: Job) -> int:
    """Has a checkpoint stored; returns its step."""
    before = (await job.status()).checkpoint.answered
    await job.client.save_checkpoint(job.name)
    known = await job.until(lambda status: status.checkpoint.answered > before)
    assert known.checkpoint.step is not None
    return known.checkpoint.step


async def suspended_with_checkpoints(job: Job, folder: Path) -> list[Path]:
    """Suspends a job once it has a checkpoint, and returns the folders of its checkpoints, the newest first, once no
    process is left."""
    await eventually(lambda: steps(job, 0), within=PATIENCE)
    await store(job)
    await job.client.suspend(job.name)
    await job.until(lambda status: status.phase is JobPhase.SUSPENDED)
    await job.ended()
    found = [metadata.parent for metadata in (folder / "storage").glob("step-*/.metadata")]
    assert len(found) == 2
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def damage(folders: list[Path]) -> list[str]:
    """Damages each checkpoint in another way; returns what must be said of them."""
    expected: list[str] = []
    for number, folder in enumerate(folders):
        file = folder / f"__{number % 2}_0.distcp"
        if number == 0:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            expected.append(f"{folder.name}: {file.name} has other bytes than were stored")
        else:
            file.unlink()
            expected.append(f"{folder.name}: {file.name} is missing")
    return expected


def contents(folders: list[Path]) -> dict[Path, bytes]:
    return {file: file.read_bytes() for folder in folders for file in folder.iterdir()}


@pytest.mark.long("storage")
async def test_a_job_whose_checkpoints_are_all_damaged_stops_with_each_of_them_named(site: Site, tmp_path: Path):
    job = await train(site, tmp_path)
    damaged = await suspended_with_checkpoints(job, tmp_path)
    expected = damage(damaged)
    before, made = contents(damaged), len(steps(job, 0))
    await job.client.resume(job.name)
    result = await job.client.wait(job.name)
    assert (result.phase, result.exit_code) == (JobPhase.FAILED, 1)
    explained = explanation((await job.incidents())[-1], job=job.name, flag="").plain
    for text in expected:
        assert text in result.reason
        assert text in explained
    assert "checkpoint.on_unusable: start_over" in result.reason
    assert len(steps(job, 0)) == made
    await job.ended()
    assert contents(damaged) == before


@pytest.mark.long("storage")
async def test_a_job_that_may_start_over_begins_at_the_first_step_and_deletes_no_damaged_checkpoint(
    site: Site, tmp_path: Path
):
    job = await train(site, tmp_path, on_unusable="start_over")
    damaged = await suspended_with_checkpoints(job, tmp_path)
    expected = damage(damaged)
    before, made = contents(damaged), len(steps(job, 0))
    await job.client.resume(job.name)
    await eventually(lambda: steps(job, 0)[made:], within=PATIENCE)
    assert steps(job, 0)[made] == 1
    # It passes the steps that it had, and deletes checkpoints of its own.
    first = await store(job)
    explained = "\n".join(explanation(one, job=job.name, flag="").plain for one in await job.incidents())
    assert all(text in explained for text in expected)
    await eventually(lambda: steps(job, 0)[-1] > step_of(damaged[0]), within=PATIENCE)
    for _ in range(2):
        assert await store(job) > step_of(damaged[0])
    await eventually(lambda: not list((tmp_path / "storage").glob(f"step-{first}-*")), within=PATIENCE)
    assert contents(damaged) == before
    await job.client.cancel(job.name)
    await job.ended()
