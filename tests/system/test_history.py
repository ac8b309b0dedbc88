"""The history of a whole local Perdure: kept by its worker, over a worker that is killed, and without Temporal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.base.state_folder import StateFolder
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import CommandLine, end_nodes
from tests.support.waiting import wait_for

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
