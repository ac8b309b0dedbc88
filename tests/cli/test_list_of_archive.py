"""Tests of `perdure list --archive`, which asks no server."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from perdure.contract import ArchivedJob, JobPhase
from tests.support.command_line import CommandLine

NOW = datetime.now(UTC)


def keep(
    place: Path, name: str, *, days: int, namespace: str = "default", uid: str = "0123abcd", is_final: bool = True
) -> Path:
    """Writes the record of a job that began so many days ago."""
    began = NOW - timedelta(days=days)
    record = ArchivedJob(
        namespace=namespace,
        name=name,
        uid=uid,
        workflow_id=f"job/{namespace}/{name}",
        written_at=began,
        is_final=is_final,
        phase=JobPhase.SUCCEEDED if is_final else None,
        owner="ana",
        started_at=began,
        finished_at=began + timedelta(hours=2) if is_final else None,
        spec={"name": name},
    )
    file = place / namespace / name / uid / "job.json"
    file.parent.mkdir(parents=True)
    file.write_text(record.model_dump_json())
    return file


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Four runs of three jobs in two namespaces."""
    folder = tmp_path / "kept"
    keep(folder, "llama", days=1500, uid="00000001")
    keep(folder, "llama", days=40, uid="00000002")
    keep(folder, "gpt", days=3, is_final=False)
    keep(folder, "vit", days=5, namespace="vision")
    (folder / "README").write_text("Whose this is.")
    return folder


def test_the_jobs_that_an_archive_keeps_are_listed_as_those_of_the_server(
    bare_command_line: CommandLine, place: Path
) -> None:
    shown = bare_command_line.run("list", "--archive", f"file://{place}")
    assert shown.code == 0, shown.err
    names = [line.split()[0] for line in shown.out.splitlines()]
    assert names == ["NAME", "gpt", "llama", "next:"]
    assert "not complete" in shown.out.splitlines()[1]
    assert {"SUCCEEDED", "ana", "40d", "2h"} <= set(shown.out.splitlines()[2].split())
    assert f"perdure status gpt --archive file://{place}" in shown.out
    assert not (bare_command_line.folder / "state").exists(), "no server was started"

    everywhere = bare_command_line.run("list", "-A", "--archive", str(place), "-o", "json", "--limit", "2")
    assert [(job["namespace"], job["name"], job["phase"]) for job in json.loads(everywhere.out)] == [
        ("default", "gpt", None),
        ("vision", "vit", "SUCCEEDED"),
    ]
    begun = bare_command_line.run("list", "--running", "--archive", str(place), "-o", "json")
    assert [job["name"] for job in json.loads(begun.out)] == ["gpt"]


def test_a_record_that_cannot_be_read_hides_no_other_one(bare_command_line: CommandLine, place: Path) -> None:
    broken = keep(place, "broken", days=1)
    broken.write_text(broken.read_text()[:100])
    newer = keep(place, "newer", days=1)
    newer.write_text(newer.read_text().replace('"format":1', '"format":99'))
    shown = bare_command_line.run("list", "--archive", str(place), "-o", "json")
    assert [job["name"] for job in json.loads(shown.out)] == ["gpt", "llama"]
    assert "broken/0123abcd/job.json is not the archive of a job" in shown.err
    assert "newer/0123abcd was written by a newer release" in shown.err


def test_of_a_record_that_no_worker_wrote_not_all_is_read(bare_command_line: CommandLine, place: Path) -> None:
    with keep(place, "huge", days=1).open("r+b") as file:
        file.truncate(100 * 1024**3)
    shown = bare_command_line.run("list", "--archive", str(place), "-o", "json")
    assert [job["name"] for job in json.loads(shown.out)] == ["gpt", "llama"]
    assert "huge/0123abcd/job.json has more than 33,554,432 bytes" in shown.err
    status = bare_command_line.run("status", "huge", "--archive", str(place))
    assert status.code != 0
    assert "job.json has more than 33,554,432 bytes" in status.err


def test_what_is_not_there_is_said(bare_command_line: CommandLine, place: Path) -> None:
    missing = bare_command_line.run("list", "--archive", str(place / "missing"))
    assert missing.code != 0
    assert f"there is nothing at {place}/missing" in missing.err
    empty = bare_command_line.run("list", "--archive", str(place), "-n", "nlp")
    assert empty.code == 0
    assert f"no jobs in the namespace nlp at {place}" in empty.out
    assert f"perdure list -A --archive {place}" in empty.out
    each = bare_command_line.run("list", "--archive", str(place) + "/${job.name}")
    assert each.code != 0
    assert "a place of its own for each job" in each.err
