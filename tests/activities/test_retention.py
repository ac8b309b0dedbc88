"""Tests of the folders of all nodes: old ones are deleted long after their job's end, and never while the job runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.client import Client, WorkflowHandle

from perdure.activities.nodes.local.backend import LocalBackend
from perdure.activities.nodes.local.folders import FolderOwner, NodeFolders, now
from perdure.activities.nodes.local.retention import delete_old_nodes, keep_tidy
from perdure.contract import NodeId
from perdure.contract.names import node_name, uid_of
from tests.activities.local_nodes import NOWHERE, LocalJob, nothing_left
from tests.support.waiting import eventually

WEEK = timedelta(days=7)


@pytest.fixture
def folders(state: Path) -> NodeFolders:
    return NodeFolders(state)


async def open_job(client: Client, job: LocalJob) -> WorkflowHandle[None, None]:
    """Has the server know the job as running: no worker serves its queue."""
    handle = await client.start_workflow("TrainingJob", id=job.job_id, task_queue=f"unserved-{job.uid}")
    assert handle.first_execution_run_id
    job.uid = uid_of(handle.first_execution_run_id)
    return handle


async def test_a_job_is_forgotten_when_all_of_it_is_older_than_the_retention(
    state: Path, folders: NodeFolders, temporal_client: Client
) -> None:
    old, mixed, young = LocalJob(state), LocalJob(state), LocalJob(state)
    gone = [old.ended(ago=WEEK * 2), old.ended(ago=WEEK + timedelta(hours=1), rank=1, incarnation=2)]
    kept = [
        mixed.ended(ago=WEEK * 2),
        mixed.ended(ago=WEEK - timedelta(hours=1), rank=1),
        young.ended(ago=timedelta()),
    ]
    assert await delete_old_nodes(folders, temporal_client, kept_jobs=0) == 1
    assert not any(folder.exists for folder in gone)
    assert all(folder.log.read_text() == LocalJob.OUTPUT for folder in kept)
    assert {path.name for path in state.iterdir()} == {"nodes"}
    assert await delete_old_nodes(folders, temporal_client, kept_jobs=0) == 0


async def test_the_newest_jobs_stay_whatever_their_age(
    state: Path, folders: NodeFolders, temporal_client: Client
) -> None:
    jobs = [LocalJob(state).ended(ago=WEEK * (2 + index)) for index in range(4)]
    assert await delete_old_nodes(folders, temporal_client, kept_jobs=3) == 1
    assert [folder.exists for folder in jobs] == [True, True, True, False]


async def test_the_state_folder_says_how_long(state: Path, folders: NodeFolders, temporal_client: Client) -> None:
    folder = LocalJob(state).ended(ago=timedelta(hours=2))
    setting = state / "retention"
    setting.write_text("3h\n")
    assert await delete_old_nodes(folders, temporal_client, kept_jobs=0) == 0
    setting.write_text("a while")
    with pytest.raises(ValueError, match="expected a duration such as"):
        await delete_old_nodes(folders, temporal_client, kept_jobs=0)
    assert folder.exists
    setting.write_text("90m")
    assert await delete_old_nodes(folders, temporal_client, kept_jobs=0) == 1


async def test_what_runs_stays(state: Path, folders: NodeFolders, temporal_client: Client) -> None:
    (state / "retention").write_text("0s")
    backend = LocalBackend(state, connection=NOWHERE)
    async with nothing_left(LocalJob(state)) as job:
        await backend.create(job.request())
        lost = job.ended(ago=WEEK * 2, rank=1)
        assert await delete_old_nodes(folders, temporal_client, kept_jobs=0) == 0
        assert lost.exists, "an earlier loss of a job that runs is part of its story"
        await backend.delete(job.ref())
        assert await delete_old_nodes(folders, temporal_client, kept_jobs=0) == 1
        assert not job.folder().exists()


async def test_a_suspended_job_has_no_process_and_keeps_its_folders(
    state: Path, folders: NodeFolders, temporal_client: Client
) -> None:
    job = LocalJob(state)
    handle = await open_job(temporal_client, job)
    folder = job.ended(ago=WEEK * 2)
    assert await delete_old_nodes(folders, temporal_client, kept_jobs=0) == 0
    await handle.terminate()
    again = LocalJob(state)
    again.job_id = job.job_id
    newer = await open_job(temporal_client, again)
    assert await delete_old_nodes(folders, temporal_client, kept_jobs=0) == 1, "the name is another run's by now"
    assert not folder.exists
    await newer.terminate()


async def test_a_server_that_does_not_answer_changes_nothing(state: Path, folders: NodeFolders) -> None:
    folder = LocalJob(state).ended(ago=WEEK * 2)
    unreachable = await Client.connect("127.0.0.1:9", lazy=True)
    with pytest.raises(RuntimeError):
        await delete_old_nodes(folders, unreachable, kept_jobs=0)
    assert folder.exists


async def test_a_deletion_that_was_cut_off_is_finished(
    state: Path, folders: NodeFolders, temporal_client: Client
) -> None:
    (state / "deleting" / "half" / "run").mkdir(parents=True)
    LocalJob(state).ended(ago=WEEK * 2)
    await delete_old_nodes(folders, temporal_client, kept_jobs=0)
    assert not (state / "deleting").exists()


async def test_the_short_way_to_a_long_folder_goes_with_it(tmp_path: Path, temporal_client: Client) -> None:
    deep = tmp_path / ("deep" * 25)
    folder = LocalJob(deep).ended(ago=WEEK * 2)
    link = folder.run_dir
    assert link.parent == Path(tempfile.gettempdir()) / f"perdure-{os.getuid()}"
    await delete_old_nodes(NodeFolders(deep), temporal_client, kept_jobs=0)
    assert not link.is_symlink()


async def test_tidying_goes_on_after_trouble(
    state: Path, folders: NodeFolders, temporal_client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    (state / "retention").write_text("a while")
    folder = LocalJob(state).ended(ago=WEEK * 2)
    tidying = asyncio.create_task(
        keep_tidy(folders, temporal_client, kept_jobs=0, interval=timedelta(milliseconds=100))
    )
    try:
        await eventually(lambda: "folders of old nodes could not be deleted: expected a duration" in caplog.text)
        (state / "retention").unlink()
        await eventually(lambda: not folder.exists)
    finally:
        tidying.cancel()
        await asyncio.gather(tidying, return_exceptions=True)


def test_nodes_that_no_worker_of_the_machine_started_go_after_the_retention(state: Path, folders: NodeFolders) -> None:
    of_ray, of_a_worker = LocalJob(state), LocalJob(state)
    old, young = of_ray.ended(ago=WEEK * 2), of_ray.ended(ago=WEEK - timedelta(hours=1), rank=1)
    started = of_a_worker.ended(ago=WEEK * 2)
    started.launcher_file.touch()
    # What was killed has written no end.
    killed, runs = of_ray.ended(ago=WEEK * 2, rank=2), of_ray.ended(ago=WEEK * 2, rank=3)
    long_ago = (now() - WEEK * 2).timestamp()
    for folder in (killed, runs):
        (folder.path / "ended.json").unlink()
        os.utime(folder.path, (long_ago, long_ago))
    assert runs.record is not None
    environment = os.environ | {"PERDURE_NODE": runs.record.mark}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environment) as process:
        folders.remove_unwatched()
        assert process.stdin is not None
        process.stdin.close()
    assert [one.exists for one in (old, young, started, killed, runs)] == [False, True, True, False, True]


def test_the_nodes_of_a_role_are_not_those_of_a_role_whose_name_ends_alike(folders: NodeFolders) -> None:
    for role in ("worker", "eval-worker"):
        node = NodeId(uid="0123abcd", role=role, rank=0, incarnation=1)
        folder = folders.folder(node_name("walk", node))
        folder.make()
        owner = FolderOwner(**dict(node), job_id="job/default/walk", group_id="g", created_at=now())
        folder.write("node.json", owner.model_dump_json())
    for role in ("worker", "eval-worker"):
        assert [one.name for one in folders.of_job("0123abcd", role)] == [f"walk-{role}-0-0123abcd1"]
