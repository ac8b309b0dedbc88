"""Tests that workflows of this release replay the recorded histories of every release without a difference."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.histories import generate
from tests.histories.recorded import MANIFEST, RECORDED, digests, freeze, read, recorded_files, releases
from tests.support.replays import replay


@pytest.mark.parametrize("path", recorded_files(), ids=lambda path: str(path.relative_to(RECORDED)))
async def test_a_recorded_history_replays(path: Path):
    await replay(read(path))


@pytest.mark.parametrize("release", releases(), ids=lambda path: path.name)
def test_recordings_of_a_release_are_as_they_were_when_it_was_made(release: Path):
    in_work = release.name == version("perdure") and not (release / MANIFEST).exists()
    assert in_work or digests(release) == (release / MANIFEST).read_text()


def test_recordings_of_a_release_are_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    released = tmp_path / version("perdure")
    released.mkdir()
    freeze(released)
    monkeypatch.setattr(generate, "RECORDED", tmp_path)
    with pytest.raises(SystemExit, match="never replaced"):
        generate.main()


def test_the_release_in_work_is_newer_than_all_that_are_recorded_or_is_the_last_of_them():
    numbers = [tuple(int(part) for part in path.name.split(".")) for path in releases()]
    assert tuple(int(part) for part in version("perdure").split(".")) >= max(numbers)


def test_both_workflows_and_their_continuations_are_recorded():
    names = {path.name.split(".")[1] for path in recorded_files()}
    assert {"job-1", "job-2", "group-1", "group-2"} <= names


def test_recorded_histories_stay_small():
    assert sum(path.stat().st_size for path in recorded_files()) < 1_000_000
