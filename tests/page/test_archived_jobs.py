"""Tests of the pages of jobs that Temporal does not know any more."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from perdure.client.archive import ArchivedJobs
from perdure.contract import ArchivedJob, ArchivedRole, JobPhase
from tests.page.conftest import SPEC, Visitor, served
from tests.page.played import HOSTILE, PlayedClient, PlayedJob, failed
from tests.page.site import PlayedApi, visitor_of
from tests.page.test_pages import events
from tests.support.waiting import eventually

PAGE = "/jobs/default/old/"
LEFT = "node 1: pod old-1 is left to the cluster: its machine gpu-7 does not answer"


def keep(place: Path, namespace: str = "default", *, is_final: bool = True) -> None:
    """Writes what the archive of a job that has failed holds, and a line of its log."""
    job = PlayedJob(failed(), name="old", namespace=namespace)
    now = datetime.now(UTC)
    ended = {"finished_at": now, "phase": JobPhase.FAILED, "archive": "file:///written/elsewhere", "left": (LEFT,)}
    record = ArchivedJob(
        namespace=namespace,
        name="old",
        uid="0123abcd",
        workflow_id=f"job/{namespace}/old",
        written_at=now,
        is_final=is_final,
        phase=JobPhase.FAILED if is_final else None,
        started_at=job.status.started_at,
        finished_at=now + timedelta(seconds=1) if is_final else None,
        spec=dict(SPEC),
        roles={"worker": ArchivedRole(status=job.status.model_copy(update=ended))} if is_final else {},
        incidents=tuple(job.incidents) if is_final else (),
    )
    folder = place / namespace / "old" / "0123abcd"
    logs = folder / "logs" / "worker-0" / "1"
    logs.mkdir(parents=True)
    (folder / "job.json").write_text(record.model_dump_json())
    (logs / "part-000000.log").write_text(f"the last words of {namespace}: {HOSTILE}\n")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    keep(tmp_path)
    keep(tmp_path, "vision")
    return tmp_path


@pytest.fixture
async def visitor(client: PlayedClient, place: Path) -> AsyncIterator[Visitor]:
    async with served(client, archive=f"file://{place}") as found:
        yield found


async def test_a_job_that_temporal_has_forgotten_is_shown_from_its_archive(visitor: Visitor, place: Path) -> None:
    source = await visitor.get(PAGE)
    page = unescape(source)
    assert f"complete, at file://{place}/default/old/0123abcd; this is read from it" in page
    for shown in ("FAILED", "<svg", 'id="incident-1"', "train.py", LEFT):
        assert shown in page
    assert 'href="change/' not in page, "what has ended cannot be changed"
    assert "in the Temporal UI" not in page
    assert "<img" not in source
    lines, end = await events(visitor, f"{PAGE}lines?node=0", 2)
    assert "the last words of default" in lines[0]
    assert "\x1b" not in lines[0]
    assert end == ""


async def test_what_neither_knows_is_not_found(visitor: Visitor) -> None:
    assert "new" in await visitor.get("/jobs/default/new/", status=404)


async def test_an_archive_that_is_not_complete_says_so(client: PlayedClient, tmp_path: Path) -> None:
    keep(tmp_path, is_final=False)
    async with served(client, archive=f"file://{tmp_path}") as visitor:
        assert "only as it began" in await visitor.get(PAGE, status=503)


@pytest.mark.parametrize(
    "path", ["/jobs/default/..%2Fvision%2Fold/", "/jobs/default/..%2F..%2Fetc/", "/jobs/..%2F/old/"]
)
async def test_no_name_leads_out_of_the_namespace(visitor: Visitor, path: str) -> None:
    await visitor.get(path, status=404)
    assert "the last words" not in str(await events(visitor, f"{path}lines"))


def change(place: Path, changes: Mapping[str, Any]) -> None:
    """Writes into the record of the job, as whoever may write to its archive."""
    file = place / "default" / "old" / "0123abcd" / "job.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


_TIME = "2026-11-26T00:00:00Z"
INCIDENT = {"number": 1, "title": "x", "started_at": _TIME, "noticed_at": _TIME}


@pytest.mark.parametrize(
    "changes",
    [
        {"incidents": [INCIDENT] * 20_000},
        {"spec": dict.fromkeys(map(str, range(100_000)), 1)},
        {"datasets": {str(number): {} for number in range(10_000)}},
        {"roles": {"worker": {"status": {"lost": [1] * 3_000_000}}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_a_record_that_is_made_to_keep_the_page_busy_is_not_shown(
    visitor: Visitor, place: Path, changes: Mapping[str, Any]
) -> None:
    change(place, changes)
    assert "which no worker has written" in unescape(await visitor.get(PAGE, status=503))


async def test_a_record_speaks_for_the_job_of_its_folder_only(visitor: Visitor, place: Path) -> None:
    change(place, {"namespace": "vision"})
    assert "is about vision/old" in unescape(await visitor.get(PAGE, status=503))
    jobs, problems = await ArchivedJobs(f"file://{place}").kept(everywhere=True)
    assert [(job.namespace, job.name) for job in jobs] == [("vision", "old")]
    assert len(problems) == 1


async def test_users_see_what_is_kept_of_their_namespaces_only(client: PlayedClient, place: Path) -> None:
    async with visitor_of(client, PlayedApi(), archive=f"file://{place}") as visitor:
        await visitor.post("/sign-in", {"token": "cleo", "back": ""})
        assert "old" in await visitor.get("/jobs/vision/old/")
        await visitor.get(PAGE, status=403)
        await visitor.get(f"{PAGE}lines", status=403)


def hang(place: Path, name: str) -> Path:
    """Has reads of this job's record wait until something is written into the file."""
    folder = place / "default" / name / "0123abcd"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "job.json")
    return folder / "job.json"


def reading(file: Path) -> int | None:
    """Opens a file that something waits to read; None before that."""
    try:
        return os.open(file, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


async def test_an_archive_that_hangs_keeps_no_other_page_from_its_visitors(visitor: Visitor, place: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    files = [hang(place, name) for name in ("stuck", "as-well")]
    waiting = [asyncio.create_task(visitor.get(f"/jobs/default/{file.parts[-3]}/", status=503)) for file in files]
    ends: list[int] = []
    try:
        ends.append(await eventually(lambda: reading(files[0])))
        assert "train.py" in await visitor.get("/jobs/default/llama/")
        ends.append(await eventually(lambda: reading(files[1])))
    finally:
        ends += [end for file in files if (end := reading(file)) is not None]
        for end in ends:
            os.close(end)
    assert all("cannot be read" in page for page in await asyncio.gather(*waiting))
