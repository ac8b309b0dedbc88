"""A history of jobs for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.activities.history.store import HistoryStore


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'history.db'}"


@pytest.fixture
def store(database: str) -> Iterator[HistoryStore]:
    store = HistoryStore(database, tenant="team-a")
    store.prepare()
    yield store
    store.close()
