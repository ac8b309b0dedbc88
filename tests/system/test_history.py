"""The history of a whole local Perdure: kept by its worker, over a worker that is killed, and without Temporal."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.activities.history.activities import HistoryActivities
from perdure.activities.history.answers import answer
from perdure.activities.history.store import HistoryStore
from perdure.base.state_folder import StateFolder
from perdure.contract import HistoryRequest
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import CommandLine, end_nodes
from tests.support.temporal_server import free_port
from tests.support.waiting import eventually, wait_for
from tests.system.site import PATIENCE, WALK, Site

pytestmark = pytest.mark.long("history")


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[LocalControlPlane]:
    plane = LocalControlPlane(StateFolder(tmp_path / "state"))
    yield plane
    plane.kill_worker()
    plane.kill_server()
    end_nodes(plane.state.path)


def test_jobs_are_remembered_after_their_worker_was_killed_and_temporal_has_lost_them(
    plane: LocalControlPlane, tmp_path: Path
) -> None:
    perdure = CommandLine.local(tmp_path, plane.state.path)
    perdure.environment = {**perdure.environment, "PERDURE_HISTORY": ""}
    first = perdure.run("run", "--name", "first", "--nodes", "1", "--", "python", "-c", "pass")
    assert first.code == 0, first.err
    plane.kill_worker()
    failing = perdure.run("run", "--name", "failing", "--nodes", "1", "--", "python", "-c", "raise ValueError")
    assert failing.code == 1, failing.err

    def known() -> dict[str, str]:
        answered = perdure.run("history", "-o", "json")
        # The worker that was killed may hold the recording for another minute.
        jobs = answered.json["jobs"] if answered.code == 0 else []
        return {job["name"]: job["phase"] for job in jobs if job["finished_at"]}

    assert wait_for(lambda: known() if len(known()) == 2 else None, within=180) == {
        "first": "SUCCEEDED",
        "failing": "FAILED",
    }
    plane.kill_worker()
    plane.kill_server()
    for file in plane.state.temporal.glob("temporal.db*"):
        file.unlink()
    assert perdure.run("worker", "--detach").code == 0
    wait_for(lambda: len(known()) == 2)
    assert "no jobs" in perdure.run("list").out
    assert "USER_CODE" in perdure.run("history", "--failures-by-host").out


MIB = 2**20

_SERVES = """
import sys
from http.server import HTTPServer, SimpleHTTPRequestHandler
held = b"x" * int(sys.argv[1])
HTTPServer(("127.0.0.1", int(sys.argv[2])), SimpleHTTPRequestHandler).serve_forever()
"""
_HOLDS = """
import sys, time
held = b"x" * int(sys.argv[1])
time.sleep(3600)
"""


async def test_what_nodes_use_is_recorded_while_they_run_also_of_services_and_without_a_step(site: Site) -> None:
    def program(script: str, *arguments: int) -> list[str]:
        return [sys.executable, "-c", script, *map(str, arguments)]

    port = free_port()
    job = await site.submit(
        recovery={"warm_starts": False},
        roles={
            "trainer": {"nodes": 1, "command": program(_HOLDS, 300 * MIB)},
            "server": {"nodes": 1, "command": program(_SERVES, 150 * MIB, port), "ready": {"port": port}},
        },
    )
    temporal = await site.client.connect()
    store = HistoryStore(f"sqlite:///{site.folder / 'history.db'}", tenant="team-a")
    store.prepare()

    async def used() -> dict[str, int] | None:
        # Each look of a new object reads all open jobs.
        activities = HistoryActivities(
            temporal, store, task_queue=site.client.endpoint.task_queue, retention=timedelta(days=1)
        )
        await activities.look()
        [found] = [one for one in answer(store, HistoryRequest()).jobs if one.name == job.name]
        assert found.finished_at is None
        memory = {one.role: one.peaks.memory or 0 for one in found.use if one.peaks is not None}
        return memory if memory.get("trainer", 0) > 300 * MIB and memory.get("server", 0) > 150 * MIB else None

    held = await eventually(used, what="the memory of both roles")
    assert held["trainer"] < 500 * MIB
    assert held["server"] < 300 * MIB
    store.close()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of the test keeps a history."""
    monkeypatch.setenv("PERDURE_HISTORY", "")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("kept")
async def test_an_elastic_job_is_repaired_while_its_history_is_locked_and_recorded_afterwards(
    own_site: Site, tmp_path: Path
) -> None:
    perdure = CommandLine.local(tmp_path, own_site.state.path)
    file = own_site.state.path / "history.db"

    def doctor(words: str) -> bool:
        return words in perdure.run("doctor").out

    await eventually(lambda: doctor("records jobs"))
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        role = {"nodes": "1:2", "resources": "auto", "command": [sys.executable, str(WALK), str(tmp_path / "out")]}
        job = await own_site.submit(out=tmp_path / "out", recovery={"warm_starts": False}, roles={"worker": role})
        status = await job.running(nodes=2)
        assert status.auto is not None
        assert "locked" in status.auto.problem
        await job.undisturbed(ranks=2, seconds=3)
        job.signal(1, "agent")
        job.signal(1, "rank")
        status = await job.running(nodes=2, after=status.generation)
        await eventually(lambda: doctor("no job is recorded for now"), within=PATIENCE)
        await job.undisturbed(ranks=2, seconds=3)
        job.finish()
        await own_site.client.wait(job.name)
    assert await eventually(lambda: _phases(perdure).get(job.name), within=PATIENCE) == "SUCCEEDED"


def _phases(perdure: CommandLine) -> dict[str, str]:
    answered = perdure.run("history", "-o", "json")
    jobs = answered.json["jobs"] if answered.code == 0 else []
    return {job["name"]: job["phase"] for job in jobs if job["finished_at"]}
