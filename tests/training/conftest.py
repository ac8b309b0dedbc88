"""Fixtures of the training library's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.one_rank import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "memory", monkeypatch)
