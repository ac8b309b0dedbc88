"""Fixtures of programs that attacks need, which are made before the first test: that takes longer than a test may."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.browser import ensure_browser
from scripts.cluster import binaries
from scripts.cluster.binaries import BinariesMissing


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_PROGRAMS: dict[str, Callable[[], Path]] = {
    "browser": lambda: ensure_browser(_report),
    "temporal_program": lambda: binaries.ensure(_report, (binaries.TEMPORAL_SERVER_SOURCE,))["temporal-server"],
}
"""Provides the programs, by the names of their fixtures."""

_MISSING = pytest.StashKey[dict[str, str]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes the programs that the tests ask for which are left."""
    asked = {name for item in items for name in getattr(item, "fixturenames", ())}
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    config.stash[_MISSING] = {}
    # Of several processes that run tests one makes them; none has a terminal but its standard error.
    with capture.global_and_fixture_disabled():
        for name in asked & _PROGRAMS.keys():
            try:
                _PROGRAMS[name]()
            except BinariesMissing as missing:
                config.stash[_MISSING][name] = str(missing)


@pytest.fixture(scope="session")
def browser(pytestconfig: pytest.Config) -> Path:
    """A real browser."""
    return _program("browser", pytestconfig)


@pytest.fixture(scope="session")
def temporal_program(pytestconfig: pytest.Config) -> Path:
    """Temporal's server, which can ask for credentials; the dev server cannot."""
    return _program("temporal_program", pytestconfig)


def _program(name: str, config: pytest.Config) -> Path:
    """A program; the test fails where there is none, since no other test shows what it shows."""
    if reason := config.stash[_MISSING].get(name):
        pytest.fail(reason, pytrace=False)
    return _PROGRAMS[name]()
