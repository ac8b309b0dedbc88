"""Tests of the state folder: its owner, and a full disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from perdure.base.errors import ExitCode, StateFolderError
from perdure.base.files import read_record
from perdure.base.state_folder import FORMAT, StateFolder, default_path


class Record(BaseModel):
    text: str


def test_is_made_once_and_found_again(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "deep" / "state").open()
    assert (folder.path / "version").read_text() == f"{FORMAT}\n"
    assert folder.path.stat().st_mode & 0o077 == 0, "records hold tokens"
    StateFolder(folder.path).open()


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (str(FORMAT - 1), "older format"),
        (str(FORMAT + 1), "newer release"),
        ("", "expected the folder's format"),
        ("soon", "expected the folder's format"),
    ],
)
def test_of_another_version_is_refused_with_a_remedy(tmp_path: Path, version: str, words: str) -> None:
    (tmp_path / "version").write_text(version)
    with pytest.raises(StateFolderError, match=words) as refused:
        StateFolder(tmp_path).open()
    assert "PERDURE_STATE" in refused.value.remedy
    assert refused.value.exit_code is ExitCode.UNREACHABLE
    assert list(tmp_path.iterdir()) == [tmp_path / "version"], "nothing was touched"


def test_the_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StateFolderError, match="not a state folder of Perdure"):
        StateFolder(tmp_path).open()
    assert list(tmp_path.iterdir()) == [tmp_path / "thesis.tex"]


def test_a_file_in_its_place_is_explained(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StateFolderError, match="cannot use the state folder"):
        StateFolder(tmp_path / "state").open()


def test_the_environment_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERDURE_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "perdure"
    monkeypatch.setenv("PERDURE_STATE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"


def test_records_survive_a_damaged_write(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path).open()
    path = folder.path / "record.json"
    folder.write(path, Record(text="first").model_dump_json())
    assert read_record(path, Record) == Record(text="first")
    path.write_text("{")
    assert read_record(path, Record) is None
    assert read_record(folder.path / "none.json", Record) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_is_nearly_full_is_refused_before_anything_starts(small_disk: Path) -> None:
    with pytest.raises(StateFolderError, match="is full: 1 MiB free, 64 MiB needed") as refused:
        StateFolder(small_disk / "state").open()
    assert "Free some space" in refused.value.remedy


def test_a_full_disk_leaves_the_old_record(small_disk: Path) -> None:
    folder = StateFolder(small_disk)
    record = small_disk / "record.json"
    folder.write(record, "old")
    with (small_disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, folder.free_bytes())
    with pytest.raises(StateFolderError, match=r"disk of the state folder .* is full"):
        folder.write(record, "new" * 100_000)
    assert record.read_text() == "old"
    assert {path.name for path in small_disk.iterdir()} == {"record.json", "filler"}, "no half files are left"


def test_a_folder_in_which_a_worker_has_kept_nodes_and_history_only_is_one(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "history.db").touch()
    StateFolder(tmp_path).check_version()
    StateFolder(tmp_path).open()
    assert (tmp_path / "version").is_file()
    (tmp_path / "version").unlink()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StateFolderError, match="is not a state folder"):
        StateFolder(tmp_path).check_version()
