"""Fixtures of separate state folders; nothing is left running afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.base.state_folder import StateFolder
from perdure.local.control_plane import LocalControlPlane


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateFolder]:
    """A state folder that commands and code of this test use by default."""
    folder = StateFolder(tmp_path / "state")
    monkeypatch.setenv("PERDURE_STATE", str(folder.path))
    for variable in ("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE"):
        monkeypatch.delenv(variable, raising=False)
    yield folder
    if (folder.path / "version").is_file():
        plane = LocalControlPlane(folder)
        plane.kill_worker()
        plane.kill_server()
