from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short: sockets live in it."""
    return tmp_path_factory.mktemp("s")
