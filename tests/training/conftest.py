"""Fixtures of the training library's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.cluster import binaries
from tests.support.programs import Programs, report
from tests.training.one_rank import World

_PROGRAMS = Programs(
    {"object_store_program": lambda: binaries.ensure(report, (binaries.OBJECT_STORE_SOURCE,))["versitygw"]}
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes the programs that the tests ask for which are left."""
    _PROGRAMS.make(config, items)


@pytest.fixture(scope="session")
def object_store_program() -> Path:
    """An S3 server."""
    return _PROGRAMS.path("object_store_program")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path / "memory", monkeypatch)
