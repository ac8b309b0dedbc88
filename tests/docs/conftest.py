"""Fixtures of the tests of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.cluster import binaries
from tests.support.programs import Programs, report

_PROGRAMS = Programs({"actionlint": lambda: binaries.ensure(report, (binaries.ACTIONLINT_SOURCE,))["actionlint"]})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes the programs that the tests ask for which are left."""
    _PROGRAMS.make(config, items)


@pytest.fixture(scope="session")
def actionlint() -> Path:
    """The checker of GitHub's workflows."""
    return _PROGRAMS.path("actionlint")
