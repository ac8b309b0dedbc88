"""Tests of archives on real processes: in a folder and in a real S3 server, with a lost node and without Temporal."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import s3fs

from perdure.client.archive import ArchivedJobs
from perdure.contract import JobPhase
from perdure.contract.names import archiver_workflow_id
from tests.support.command_line import CommandLine
from tests.support.object_store import object_store
from tests.system.site import Job, Site

pytestmark = [pytest.mark.long("storage"), pytest.mark.timeout(600)]


@pytest.fixture(params=["folder", "s3"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Path]]:
    """The URL of a place, and the folder in which its content is found."""
    with contextlib.ExitStack() as stack:
        if request.param == "folder":
            yield f"file://{tmp_path}/kept", tmp_path / "kept"
            return
        program: Path = request.getfixturevalue("object_store_program")
        s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps the address of its server
        store = stack.enter_context(object_store(program, tmp_path / "objects", bucket="kept"))
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield "s3://kept/jobs", store.folder / "kept" / "jobs"


async def archived(job: Job) -> None:
    temporal = await job.client.connect()
    await temporal.get_workflow_handle(archiver_workflow_id(job.workflow_id, job.uid)).result()


async def test_a_job_whose_temporal_and_nodes_are_gone_is_told_by_its_archive(
    place: tuple[str, Path], own_site: Site, tmp_path: Path
):
    url, folder = place
    command = ["sh", "-c", "echo begun; while ! test -e finish; do sleep 0.05; done; echo done"]
    job = await own_site.submit(
        command=command,
        nodes="2",
        outputs={"archive": url},
        timing={"owner_check": "1s"},
        recovery={"warm_starts": False},
    )
    await job.running(nodes=2)
    # The machine of a node is lost: nothing of it tells its end.
    for kind in ("agent", None):
        with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
            job.signal(1, kind, signal.SIGKILL)
    await job.until(lambda status: status.generation >= 2 and status.phase is JobPhase.RUNNING)
    (tmp_path / "finish").touch()
    assert (await own_site.client.wait(job.name)).phase is JobPhase.SUCCEEDED
    told = await own_site.client.incidents(job.name)
    await archived(job)
    await own_site.control_plane.stop_worker()
    await own_site.control_plane.stop_server()
    shutil.rmtree(own_site.state.path)
    own_site.state.path.mkdir()
    own_site.jobs.clear()
    async with ArchivedJobs(url) as jobs:
        assert await jobs.incidents(job.name) == told
        printed = [line async for line in jobs.logs(job.name)]
        late = [line async for line in jobs.logs(job.name, since=told[0].started_at)]
    lines = [(line.node, line.incarnation, line.text) for line in printed]
    assert (0, 1, "done") in lines
    assert any(node == 1 and number == 2 and text == "done" for node, number, text in lines)
    times = [line.time for line in printed if line.time is not None]
    assert len(times) >= 5, "all lines but those that tell of a cut have one"
    assert times == sorted(times)
    earlier = [line for line in printed if line not in late]
    assert earlier, "node 0 began before the incident"
    assert all(line.time is not None and line.time < told[0].started_at for line in earlier)
    run = folder / "default" / job.name / job.uid
    kept = sorted(str(path.relative_to(run / "events")) for path in (run / "events").rglob("part-*.jsonl*"))
    assert {"worker-0/1/agent/part-000001.jsonl", "worker-1/2/agent/part-000001.jsonl"} <= set(kept), kept
    assert (run / "report.html").is_file()
    shell = CommandLine.local(tmp_path, tmp_path / "elsewhere")
    for command in ("status", "explain", "nodes", "logs"):
        done = shell.run(command, job.name, "--archive", url)
        assert done.code == 0, done.err
    assert "node 1" in shell.run("explain", job.name, "--archive", url).out
    done = shell.run("report", job.name, "--archive", url, "-o", "report.html")
    assert done.code == 0, done.err
    assert "node 1" in (tmp_path / "report.html").read_text()
    unknown = shell.run("status", "other", "--archive", url)
    assert (unknown.code, "no archive" in unknown.err) == (2, True)
