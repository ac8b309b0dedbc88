"""Trainings whose ranks and nodes are killed, and that continue from memory; the guide's script."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.contract import JobPhase, RestoreSource
from perdure_launcher.system.memory_folder import delete_abandoned
from perdure_training.snapshots.arena import PAGE
from tests.docs.pages import PAGES
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.made_steps import repeated, sized_steps, steps
from tests.system.site import PATIENCE, Job, Site
from tests.training.ranks import run_ranks

EXAMPLES = REPOSITORY / "examples" / "04-checkpoints"
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


@pytest.mark.long("survival")
@pytest.mark.timeout(600)
async def test_a_split_state_shrinks_and_grows_and_loses_only_steps_that_no_other_node_had_yet(
    site: Site, tmp_path: Path
):
    """Without storage: worlds of two and three nodes continue from the memory of the others."""
    out = tmp_path / "out"
    command = ["torchrun", str(EXAMPLES / "sharded.py"), "--steps", "1000000", "--pause", "0.5", "--out", str(out)]
    job = await site.submit(nodes="2:3", command=command)
    job.out = out

    async def stepped_as(world_size: int, *, beyond: int) -> int:
        """Waits for some steps of a world; returns the newest."""

        def enough() -> bool:
            return [size for number, size in sized_steps(job, 0) if number > beyond][-6:] == [world_size] * 6

        await eventually(enough, within=PATIENCE)
        return steps(job, 0)[-1]

    newest = await stepped_as(3, beyond=0)
    job.signal(2, None)
    newest = await stepped_as(2, beyond=newest)
    newest = await stepped_as(3, beyond=newest)
    await job.client.scale(job.name, nodes="2")
    newest = await stepped_as(2, beyond=newest)
    made = steps(job, 0)
    worlds = [(size, numbers[0], numbers[-1]) for size, numbers in by_world(sized_steps(job, 0))]
    assert sorted(set(made)) == list(range(1, max(made) + 1)), worlds
    # A step lasts longer than its copies.
    assert repeated(made) <= 2 * (len(worlds) - 1), worlds
    assert not any("memory was not used" in one.text for it in await job.incidents() for one in it.evidence)


def by_world(made: list[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """The steps of each world in a row."""
    grouped = itertools.groupby(made, key=lambda step: step[1])
    return [(size, [number for number, _ in some]) for size, some in grouped]


def flip(path: Path) -> None:
    """Damages a snapshot."""
    with path.open("r+b") as file:
        file.seek(PAGE)
        byte = file.read(1)[0]
        file.seek(PAGE)
        file.write(bytes([byte ^ 255]))


def memory_of(job: Job, node: int) -> Path:
    return Path(job.processes(node, kind="rank")[0].environ()["PERDURE_MEMORY_DIR"])


@pytest.mark.long("survival")
@pytest.mark.parametrize("is_left", [True, False])
async def test_a_killed_nodes_own_snapshots_are_loaded_where_all_copies_are_damaged(
    site: Site, tmp_path: Path, is_left: bool
):
    """Launchers of other nodes start before that of the replacement. Without the folder, the incident says why the
    storage was used."""
    script, out = EXAMPLES / "sharded.py", tmp_path / "out"
    job = await site.submit(
        command=["torchrun", str(script), "--steps", "1000000", "--out", str(out)],
        checkpoint={"storage": f"file://{tmp_path / 'storage'}", "every": 15},
    )
    job.out = out
    await job.until(lambda status: (status.checkpoint.step or 0) > 0)
    left = memory_of(job, 0)
    rank = int(job.processes(0, kind="rank")[0].environ()["RANK"])
    # It sends no further copies.
    job.signal(0, None, signal.SIGSTOP)
    copies = list(memory_of(job, 1).rglob(f"rank-{rank}-of-2.[0-9]"))
    assert copies
    for path in copies:
        flip(path)
    if not is_left:
        shutil.rmtree(left)
    launchers = job.processes(0, kind="launcher")
    job.signal(0, None)
    for launcher in launchers:
        await asyncio.to_thread(launcher.wait, PATIENCE)
    delete_abandoned(node="another/worker-0")
    known = await job.until(lambda status: status.checkpoint.restored_generation > 1)
    texts = [evidence.text for evidence in (await job.incidents())[-1].evidence]
    if is_left:
        assert known.checkpoint.restored_from is RestoreSource.MEMORY
        assert known.checkpoint.restored_again in (0, 1)
        assert not any("memory was not used" in text for text in texts)
    else:
        assert known.checkpoint.restored_from is RestoreSource.STORAGE
        [text] = [text for text in texts if text.startswith("memory was not used for the restore")]
        assert f"of rank {rank}, node 0 has none: its memory began empty, as no predecessor had left a folder" in text
        assert re.search(r", and node 1's of steps? [\d, ]+ (is|are) damaged", text)


@pytest.mark.usefixtures("ranks")
def test_the_script_of_the_guide_runs_as_printed(tmp_path: Path):
    block = next(one for page in PAGES for one in page.blocks if one.page == GUIDE and one.language == "python")
    script = tmp_path / "train.py"
    script.write_text(block.text)
    run_ranks(str(script), tmp_path, ranks=1)
