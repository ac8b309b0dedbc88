"""Trainings whose ranks and nodes are killed, and that continue from memory; the guide's script."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.contract import JobPhase
from tests.docs.pages import PAGES
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.made_steps import repeated, steps
from tests.system.site import PATIENCE, Site

EXAMPLES = REPOSITORY / "examples" / "checkpoints"
GUIDE = "docs/checkpoints.md"
STEPS = 150


async def undisturbed(script: Path, folder: Path) -> str:
    """The digest of a run without Perdure."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    run = [*command, "--steps", str(STEPS), "--pause", "0", "--out", str(folder)]
    await asyncio.to_thread(subprocess.run, run, cwd=REPOSITORY, check=True, timeout=PATIENCE, capture_output=True)
    return (folder / "digest").read_text()


@pytest.mark.long("survival")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "example",
    ["plain.py", "sharded.py", "hugging_face.py", "lightning_trainer.py"],
)
async def test_killed_ranks_and_nodes_lose_at_most_one_step_and_change_no_parameter(
    site: Site, tmp_path: Path, example: str
):
    script, out = EXAMPLES / example, tmp_path / "out"
    job = await site.submit(command=["torchrun", str(script), "--steps", str(STEPS), "--out", str(out)])
    job.out = out
    await eventually(lambda: 30 in steps(job, 0), within=PATIENCE)
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    after = steps(job, 0)[-1]
    await eventually(lambda: steps(job, 0)[-1] >= after + 10, within=PATIENCE)
    job.signal(0, None)
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    assert [incident.culprit for incident in await job.incidents()] == [1, 0]
    for rank in (0, 1):
        assert sorted(set(steps(job, rank))) == list(range(1, STEPS + 1))
        assert repeated(steps(job, rank)) <= 2
    assert (out / "digest").read_text() == await undisturbed(script, tmp_path / "undisturbed")


@pytest.mark.long("survival")
async def test_killed_launchers_lose_no_snapshots_where_their_nodes_are_started_again(site: Site, tmp_path: Path):
    """The launcher owns the memory folder of its node; no other node has a snapshot that is left."""
    script, out = EXAMPLES / "plain.py", tmp_path / "out"
    job = await site.submit(command=["torchrun", str(script), "--steps", str(STEPS), "--out", str(out)])
    job.out = out
    await eventually(lambda: 30 in steps(job, 0), within=PATIENCE)
    for process in [*job.processes(0, kind="launcher"), *job.processes(1, kind="launcher")]:
        process.kill()
    result = await job.client.wait(job.name)
    assert result.phase is JobPhase.SUCCEEDED
    for rank in (0, 1):
        assert sorted(set(steps(job, rank))) == list(range(1, STEPS + 1))
        assert repeated(steps(job, rank)) <= 1


def test_the_script_of_the_guide_runs_as_printed(tmp_path: Path):
    block = next(one for page in PAGES for one in page.blocks if one.page == GUIDE and one.language == "python")
    script = tmp_path / "train.py"
    script.write_text(block.text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=PATIENCE, capture_output=True)
