"""Jobs whose nodes are all lost, and that continue from storage; a world of four that others load with torch alone."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.contract import JobPhase, RestoreSource
from perdure_training.node_api.storage_link import StorageLink, StorageProblem
from tests.agent.test_agent_checkpoints import opened, recipe, request
from tests.support.allocation import REPOSITORY
from tests.support.command_line import PERDURE
from tests.support.small_disks import small_disk
from tests.support.waiting import eventually
from tests.system.made_steps import steps
from tests.system.site import PATIENCE, Job, Site

EXAMPLE = REPOSITORY / "examples" / "04-checkpoints" / "plain.py"
SHARDS = Path(__file__).with_name("shards_of_a_model.py")
TWO_CHECKPOINTERS = Path(__file__).with_name("two_checkpointers.py")


async def until_durable(job: Job, *, after: int = 0) -> int:
    """The step of the newest durable checkpoint, once it is beyond a step."""
    known = await job.until(lambda status: (status.checkpoint.step or 0) > after)
    assert known.checkpoint.step is not None
    return known.checkpoint.step


@pytest.mark.long("storage")
async def test_a_job_that_has_lost_all_nodes_continues_from_storage(site: Site, tmp_path: Path):
    out, storage = tmp_path / "out", tmp_path / "storage"
    job = await site.submit(
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
        checkpoint={"storage": f"file://{storage}", "every": 20, "keep_last": 2},
    )
    job.out = out
    await until_durable(job)
    requested = steps(job, 0)[-1]
    answer = await asyncio.to_thread(
        subprocess.run,
        [*PERDURE, "checkpoint", job.name, "--wait"],
        env={**os.environ, "PERDURE_STATE": str(site.state.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout.split()[1]) >= requested
    reached = steps(job, 0)[-1]
    await site.client.suspend(job.name)
    await job.until(lambda status: status.phase is JobPhase.SUSPENDED)
    durable = (await job.status()).checkpoint.step
    assert durable is not None
    assert durable > reached, "it is saved before it is suspended"
    await job.ended()
    made = len(steps(job, 0))
    await site.client.resume(job.name)
    known = await job.until(lambda status: status.checkpoint.restored_generation > 1)
    assert known.checkpoint.restored_from is RestoreSource.STORAGE
    # One more may have been committed while the nodes were released.
    restored = known.checkpoint.restored_step
    assert restored is not None
    assert restored >= durable
    await eventually(lambda: steps(job, 0)[made:], within=PATIENCE)
    assert steps(job, 0)[made] == restored + 1
    await until_durable(job, after=restored)
    job.signal(1, "rank")
    known = await job.until(lambda status: status.checkpoint.restored_from is RestoreSource.MEMORY)
    assert not known.warnings


@pytest.mark.long("storage")
async def test_a_script_without_a_checkpointer_is_suspended_at_once_and_named(site: Site, tmp_path: Path):
    job = await site.submit(checkpoint={"storage": f"file://{tmp_path / 'storage'}", "save_timeout": "1h"})
    await job.stepping(generation=1, ranks=2)
    [warning] = (await job.until(lambda status: bool(status.warnings))).warnings
    assert "the script saves none there: use a Checkpointer" in warning
    await site.client.suspend(job.name)
    await job.until(lambda status: status.phase is JobPhase.SUSPENDED)
    await job.ended()


@pytest.mark.long("storage")
async def test_the_checkpoints_of_two_checkpointers_of_a_script_become_durable(site: Site, tmp_path: Path):
    storage = tmp_path / "storage"
    job = await site.submit(
        command=["torchrun", str(TWO_CHECKPOINTERS)],
        checkpoint={"storage": f"file://{storage}", "every": 20, "keep_last": 100},
    )

    def committed(name: str) -> int:
        return len(list(storage.glob(f"{name}/*/.metadata")))

    await eventually(lambda: min(committed("model"), committed("buffer")) >= 5, within=PATIENCE)
    await site.client.cancel(job.name)
    await job.ended()


@pytest.mark.long("storage")
async def test_nodes_that_are_ended_from_outside_save_first(site: Site, tmp_path: Path):
    out, storage = tmp_path / "out", tmp_path / "storage"
    job = await site.submit(
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
        checkpoint={"storage": f"file://{storage}", "every": 1_000_000},
        limits={"termination_grace_period": "60s"},
    )
    job.out = out
    await job.running(nodes=2)
    await eventually(lambda: steps(job, 0)[10:], within=PATIENCE)
    reached = steps(job, 0)[-1]
    for node in (0, 1):
        job.signal(node, "launcher", signal.SIGTERM)
    known = await job.until(lambda status: status.checkpoint.restored_generation > 1)
    assert known.checkpoint.restored_from is RestoreSource.STORAGE
    assert (known.checkpoint.restored_step or 0) > reached
    await site.client.cancel(job.name)
    await job.ended()


@pytest.mark.long("storage")
@pytest.mark.parametrize("ranks", [2, 3])
async def test_a_model_split_over_four_ranks_is_loaded_by_another_number_with_torch_alone(
    site: Site, tmp_path: Path, ranks: int
):
    storage, whole = tmp_path / "storage", str(tmp_path / "whole.pt")
    save = ["torchrun", str(SHARDS), "save", whole]
    job = await site.submit(
        roles={"worker": {"nodes": "2", "nproc_per_node": 2, "command": save}},
        checkpoint={"storage": f"file://{storage}"},
    )
    assert (await job.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    [metadata] = storage.rglob(".metadata")
    assert len(list(metadata.parent.glob("*.distcp"))) == 4
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SHARDS)]
    run = await asyncio.to_thread(
        subprocess.run,
        [*command, "load", whole, str(metadata.parent)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert sorted(run.stdout.split()) == [f"rank-{rank}:same" for rank in range(ranks)]


@pytest.mark.long("storage")
async def test_a_kill_between_the_last_part_and_the_commit_leaves_a_whole_checkpoint(site: Site, tmp_path: Path):
    out, storage = tmp_path / "out", tmp_path / "storage"
    job = await site.submit(
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
        checkpoint={"storage": f"file://{storage}", "every": 20},
    )
    job.out = out
    first = await until_durable(job)
    # Without workers nothing is committed, and the ranks train on.
    await site.control_plane.stop_worker()
    try:
        torn = await eventually(
            lambda: [
                folder
                for folder in storage.iterdir()
                if len(list(folder.glob("perdure-*.json"))) == 2 and not (folder / ".metadata").exists()
            ],
            within=PATIENCE,
        )
        memory = {Path(process.environ()["PERDURE_MEMORY_DIR"]) for process in job.processes(kind="rank")}
        for node in range(2):
            job.signal(node, None)
        # The next launchers on a machine take over what is left there, as if the machine had not been lost.
        for folder in memory:
            shutil.rmtree(folder)
    finally:
        await site.start()
    known = await job.until(lambda status: status.checkpoint.restored_generation > 1)
    assert known.checkpoint.restored_from is RestoreSource.STORAGE
    assert known.checkpoint.restored_step is not None
    assert known.checkpoint.restored_step >= first
    # Its parts are durable: it is committed if all reports have reached the job, else the one before counts.
    assert known.checkpoint.restored_step <= int(torn[0].name.split("-")[1])
    assert any(storage.glob(f"step-{known.checkpoint.restored_step}-*/.metadata"))


@pytest.mark.long("storage")
async def test_ranks_of_a_world_that_is_over_commit_nothing_while_the_next_one_saves(site: Site, tmp_path: Path):
    out, storage = tmp_path / "out", tmp_path / "storage"
    job = await site.submit(
        command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
        checkpoint={"storage": f"file://{storage}", "every": 20},
    )
    job.out = out
    await until_durable(job)
    environments = [job.processes(node, kind="rank")[0].environ() for node in (0, 1)]
    folder = f"step-10000000-{environments[0]['PERDURE_RUN_ID']}-1"

    async def store_as_old_rank(rank: int) -> None:
        """Does what a rank of the first world does that no one has ended."""
        content = bytes(1000)
        files = [opened(tmp_path, "snapshot", content), opened(tmp_path, "recipe", recipe([(1, 0, len(content))]))]
        fields = {"folder": folder, "step": 10_000_000, "rank": rank, "ranks": 2, "name": f"__{rank}_0.distcp"}
        link = StorageLink(Path(environments[rank]["PERDURE_PROGRESS_DIR"]).parent)
        try:
            await asyncio.to_thread(link.ask, request(content, **fields), files=files, within=PATIENCE)
        finally:
            for file in files:
                os.close(file)

    # One part is durable, and reported, before the world is over.
    await store_as_old_rank(0)
    assert (storage / folder / "__0_0.distcp").exists()
    job.signal(1, "rank")
    await job.running(nodes=2, after=1)
    saved = asyncio.create_task(until_durable(job, after=(await job.status()).checkpoint.step or 0))
    tries = 0
    while not saved.done() or not tries:
        for rank in (0, 1):
            with pytest.raises(StorageProblem, match="generation 1 is over: this node is in generation 2"):
                await store_as_old_rank(rank)
        tries += 1
    assert await saved < 10_000_000
    known = (await job.status()).checkpoint
    assert known.folder.endswith("-2")
    assert (storage / known.folder / ".metadata").exists()
    assert not (storage / folder / "__1_0.distcp").exists()
    assert not (storage / folder / ".metadata").exists()


@pytest.mark.long("storage")
async def test_a_job_whose_memory_is_too_small_for_snapshots_stores_and_continues_from_storage(
    site: Site, tmp_path: Path
):
    out, storage = tmp_path / "out", tmp_path / "storage"
    with small_disk(tmp_path / "memory", "16k") as memory:
        train = shlex.join(["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)])
        job = await site.submit(
            nodes="1",
            command=["sh", "-c", f"PERDURE_MEMORY_DIR={memory} exec {train}"],
            checkpoint={"storage": f"file://{storage}", "every": 1_000_000},
        )
        job.out = out
        await job.running(nodes=1)
        await eventually(lambda: steps(job, 0)[10:], within=PATIENCE)
        reached = steps(job, 0)[-1]
        await site.client.save_checkpoint(job.name)
        stored = await until_durable(job)
        assert stored > reached
        assert not list(memory.rglob("rank-*.[0-9]"))
        job.signal(0, None)
        known = await job.until(lambda status: status.checkpoint.restored_generation > 1)
        assert known.checkpoint.restored_from is RestoreSource.STORAGE
        assert known.checkpoint.restored_step == stored
        assert not known.warnings
        await site.client.cancel(job.name)
        await job.ended()


@pytest.mark.long("storage")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_full_storage_is_a_warning_and_stores_again_when_there_is_room(site: Site, tmp_path: Path):
    out, storage = tmp_path / "out", tmp_path / "storage"
    storage.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(storage)], check=True)
    try:
        job = await site.submit(
            command=["torchrun", str(EXAMPLE), "--steps", "100000", "--out", str(out)],
            checkpoint={"storage": f"file://{storage}", "every": 20},
        )
        job.out = out
        known = await job.until(lambda status: bool(status.warnings))
        assert "No space left on device" in known.warnings[0]
        reached = steps(job, 0)[-1]
        await eventually(lambda: steps(job, 0)[-1] > reached + 20, within=PATIENCE)
        subprocess.run(["mount", "-o", "remount,size=64m", str(storage)], check=True)
        await until_durable(job)
        assert not (await job.status()).warnings
        assert (await job.status()).generation == 1
    finally:
        await site.end_jobs()
        subprocess.run(["umount", str(storage)], check=True)
