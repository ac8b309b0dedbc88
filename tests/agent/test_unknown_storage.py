"""A storage that cannot say whether a file is there: nothing is deleted, listed or committed by a guess."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from perdure.agent.checkpoint.retention import Retention
from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointRef
from perdure.spec.checkpoint import Checkpoint

Failure = Callable[[str, int], None]
"""Has every look at files whose path contains a text fail with an error number."""

OLD, NEW = (CheckpointRef(step=step, generation=1, run="run") for step in (10, 20))


@pytest.fixture(params=["folder", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    url = str(tmp_path) if request.param == "folder" else f"memory://{uuid4().hex}/checkpoints"
    storage = Storage(url)
    for one in (OLD, NEW):
        storage.write(f"{one.folder}/metadata.uncommitted", [b"pickle"])
        storage.commit(one)
    return storage


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Failure:
    stat, info = os.stat, fsspec.get_filesystem_class("memory").info

    def failing(of: str, code: int) -> None:
        def fail_stat(path: Any, *, dir_fd: int | None = None, **options: Any) -> os.stat_result:
            folder = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
            if of in f"{folder}/{path}":
                raise OSError(code, os.strerror(code), path)
            return stat(path, dir_fd=dir_fd, **options)

        def fail_info(self: Any, path: str, **options: Any) -> dict[str, Any]:
            if of in path:
                raise OSError(code, os.strerror(code), path)
            return info(self, path, **options)

        monkeypatch.setattr(os, "stat", fail_stat)
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", fail_info)

    return failing


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ETIMEDOUT])
def test_a_file_that_cannot_be_looked_at_is_not_taken_for_absent(storage: Storage, fail: Failure, code: int):
    fail(f"{OLD.folder}/.metadata", code)
    with pytest.raises(OSError, match=os.strerror(code)):
        storage.is_committed(OLD)
    with pytest.raises(OSError, match=os.strerror(code)):
        storage.delete(OLD)
    assert storage.names(OLD.folder) == {".metadata"}
    assert storage.is_committed(NEW)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR])
def test_what_is_absent_is(storage: Storage, fail: Failure, code: int):
    fail(f"{OLD.folder}/.metadata", code)
    assert not storage.is_committed(OLD)


def test_a_link_or_a_file_on_the_way_is_no_checkpoint(tmp_path: Path):
    storage = Storage(str(tmp_path))
    storage.write("file", [b"1"])
    (tmp_path / OLD.folder).symlink_to(tmp_path)
    (tmp_path / NEW.folder).write_text("a file")
    assert not storage.is_committed(OLD)
    assert not storage.is_committed(NEW)


def test_retention_deletes_nothing_while_one_look_fails_and_all_that_is_due_afterwards(
    storage: Storage, fail: Failure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    kept = Retention(storage, Checkpoint(storage=storage.url, keep_last=2))
    fail(f"{OLD.folder}/.metadata", errno.ESTALE)
    kept.apply(NEW, [])
    monkeypatch.undo()
    assert storage.saved("") == [NEW, OLD]
    assert "old checkpoints are not deleted" in caplog.text
    Retention(storage, Checkpoint(storage=storage.url, keep_last=1)).apply(NEW, [])
    assert storage.saved("") == [NEW]


def test_a_storage_that_lacks_what_was_just_committed_is_no_ground_to_delete(storage: Storage):
    gone = CheckpointRef(step=30, generation=1, run="run")
    Retention(storage, Checkpoint(storage=storage.url, keep_last=1)).apply(gone, [])
    assert storage.saved("") == [NEW, OLD]
