"""What a site's page reads of logs that are kept: the page's rights are not those of the users who look at it.

`outputs.logs` is what the author of a specification wished, and a machine that has joined names its log as it likes. An
archive is written to by the jobs themselves.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from perdure.client.client import Client
from perdure.client.logs import LogLine
from perdure.contract import JobPhase, NodePhase, NodeView
from tests.page.conftest import Visitor
from tests.page.played import PlayedClient, PlayedJob, failed
from tests.page.site import PlayedApi, visitor_of
from tests.page.test_archived_jobs import keep
from tests.page.test_pages import events

SECRET = "TEMPORAL_API_KEY=secret"
LLAMA = "/jobs/default/llama/lines"
OLD = "/jobs/default/old/lines"


class ReadingClient(PlayedClient):
    """Reads the logs of played jobs as a client does."""

    def logs(self, *args: Any, **chosen: Any) -> AsyncGenerator[LogLine]:
        return Client.logs(self, *args, **chosen)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


@pytest.fixture
def client(client: PlayedClient) -> ReadingClient:
    return ReadingClient(*client.jobs.values())


@pytest.fixture
async def visitor(client: ReadingClient, archive: Path) -> AsyncIterator[Visitor]:
    async with visitor_of(client, PlayedApi(), archive=f"file://{archive}") as found:
        await found.post("/sign-in", {"token": "ana", "back": ""})
        yield found


class EndedJob(PlayedJob):
    """A job in Temporal that has ended, with one node that is gone."""

    log_path = ""

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        return (
            NodeView(
                rank=0,
                incarnation=1,
                phase=NodePhase.REMOVED,
                log_path=self.log_path,
                since=self.moved(self.scenario.now),
            ),
        )


def ended(client: ReadingClient, *, log_path: str = "", **status: str) -> EndedJob:
    job = EndedJob(failed(), name="llama")
    job.log_path = log_path
    job.fields = {
        "finished_at": datetime.now(UTC),
        "phase": JobPhase.FAILED,
        "archive": "",
        "logs_url": "",
        "backend": "kubernetes",
    } | status
    client.jobs["default", "llama"] = job
    return job


def put_log(folder: Path, text: str = SECRET) -> Path:
    logs = folder / "worker-0" / "1"
    logs.mkdir(parents=True)
    (logs / "part-000000.log").write_text(f"{text}\n")
    return logs


async def shown(visitor: Visitor, path: str = LLAMA) -> str:
    return str(await events(visitor, path))


async def test_another_job_s_copies_are_not_read_where_a_specification_names_them(
    visitor: Visitor, client: ReadingClient, archive: Path
) -> None:
    other = archive / "vision" / "resnet" / "0123abcd" / "logs"
    put_log(other)
    ended(client, logs_url=f"file://{other}")
    found = await shown(visitor)
    assert SECRET not in found
    assert "with your own rights" in found


async def test_a_chain_of_file_systems_reads_no_file_of_the_page(
    visitor: Visitor, client: ReadingClient, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    places = tmp_path / "logs" / "worker-0" / "1"
    places.parent.mkdir(parents=True)
    places.write_text(json.dumps({"version": 1, "refs": {"/part-000001.log": [f"file://{secret}"]}}))
    ended(client, logs_url=f"reference::file://{tmp_path}/logs")
    assert SECRET not in await shown(visitor)


async def test_no_address_of_the_network_is_asked(visitor: Visitor, client: ReadingClient) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text='<a href="part-000001.log">x</a>', content_type="text/html")

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ended(client, logs_url=f"http://127.0.0.1:{runner.addresses[0][1]}/admin")
        await shown(visitor)
    finally:
        await runner.cleanup()
    assert asked == []


async def test_no_file_is_read_that_a_node_says_is_its_log(
    visitor: Visitor, client: ReadingClient, tmp_path: Path
) -> None:
    log = tmp_path / "of-another" / "logs" / "output.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{SECRET}\n")
    ended(client, log_path=str(log))
    assert SECRET not in await shown(visitor)


async def test_a_job_s_own_archive_is_read(visitor: Visitor, client: ReadingClient, archive: Path) -> None:
    job = ended(client)
    place = f"s3://written/elsewhere/default/llama/{job.status.uid}"
    ended(client, archive=place, logs_url=f"{place}/logs")
    put_log(archive / "default" / "llama" / job.status.uid / "logs", "its last words")
    assert "its last words" in await shown(visitor)


async def test_a_link_in_an_archive_leads_nowhere(visitor: Visitor, archive: Path, tmp_path: Path) -> None:
    """Jobs write to a shared volume, which the page mounts, too."""
    keep(archive)
    assert "the last words" in await shown(visitor, OLD)
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    part = archive / "default" / "old" / "0123abcd" / "logs" / "worker-0" / "1" / "part-000000.log"
    part.unlink()
    part.symlink_to(secret)
    assert SECRET not in await shown(visitor, OLD)
    (archive / "default" / "new").symlink_to(archive / "vision" / "old")
    keep(archive, "vision")
    await visitor.get("/jobs/default/new/", status=503)


async def test_a_record_that_names_logs_elsewhere_shows_those_of_its_archive(
    visitor: Visitor, archive: Path, tmp_path: Path
) -> None:
    keep(archive)
    put_log(tmp_path / "elsewhere")
    path = archive / "default" / "old" / "0123abcd" / "job.json"
    record = json.loads(path.read_text())
    record["roles"]["worker"]["status"]["logs_url"] = f"file://{tmp_path}/elsewhere"
    path.write_text(json.dumps(record))
    found = await shown(visitor, OLD)
    assert SECRET not in found
    assert "the last words" in found


async def test_a_record_without_end_is_not_read(visitor: Visitor, archive: Path) -> None:
    keep(archive)
    with (archive / "default" / "old" / "0123abcd" / "job.json").open("ab") as file:
        file.truncate(100 * 1024**3)
    assert "which no worker has written" in await visitor.get("/jobs/default/old/", status=503)


async def test_a_record_of_more_objects_than_a_job_has_is_not_read(visitor: Visitor, archive: Path) -> None:
    """Each takes many times its bytes of memory, which ended the page for everybody."""
    keep(archive)
    path = archive / "default" / "old" / "0123abcd" / "job.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"datasets": {str(number): {} for number in range(260_000)}}))
    assert "which no worker has written" in await visitor.get("/jobs/default/old/", status=503)
