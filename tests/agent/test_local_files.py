"""What a storage in a folder has reported as durable is there after a loss of power: the names of files, too."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointRef

SAVED = CheckpointRef(step=5, generation=1, run="run")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is made durable, in this order."""
    found: list[Path] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return found


def test_a_written_file_is_durable_with_its_name_and_all_new_folders_above_it(tmp_path: Path, synced: list[Path]):
    root = tmp_path / "new" / "storage"
    storage = Storage(str(root))
    storage.write("stage-1/step/part", [b"1", b"2"])
    folder = root / "stage-1" / "step"
    made = [tmp_path, tmp_path / "new", root, root / "stage-1"]
    assert synced == [*made, folder / "part", folder], "the content comes before the name"
    synced.clear()
    storage.write("stage-1/step/other", [b"3"])
    assert synced == [folder / "other", folder]


def test_a_commit_is_durable(tmp_path: Path, synced: list[Path]):
    storage = Storage(str(tmp_path))
    storage.write(f"{SAVED.folder}/metadata.uncommitted", [b"pickle"])
    synced.clear()
    storage.commit(SAVED)
    assert synced == [tmp_path / SAVED.folder]
    assert storage.is_committed(SAVED)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_stores_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    storage = Storage(str(tmp_path))
    assert storage.write(f"{SAVED.folder}/metadata.uncommitted", [b"pickle"])[0] == 6
    storage.commit(SAVED)
    assert storage.is_committed(SAVED)


def test_a_disk_that_fails_to_keep_a_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    storage = Storage(str(tmp_path))
    storage.write("step/one", [b"1"])
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        storage.write("step/other", [b"2"])


def test_sizes_are_listed_where_they_are_known_and_links_not_followed(tmp_path: Path):
    storage = Storage(str(tmp_path / "storage"))
    storage.write("step/part", [b"12345"])
    (tmp_path / "storage" / "step" / "link").symlink_to("/etc/passwd")
    sizes = storage.sizes("step")
    assert (sizes["part"], sizes.keys()) == (5, {"part", "link"})
    assert sizes["link"] == len("/etc/passwd")
    assert storage.sizes("none") == {}
