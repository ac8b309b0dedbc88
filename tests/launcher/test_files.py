"""Files that other processes read are replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perdure_launcher.system.files import write_file


def test_a_file_is_replaced_and_no_draft_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, "old")
    before = path.stat().st_ino
    write_file(str(path), "café", durable=True)
    assert path.read_text(encoding="utf-8") == "café"
    assert path.stat().st_ino != before
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_keeps_the_old_content_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_file(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, "new", durable=True)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
