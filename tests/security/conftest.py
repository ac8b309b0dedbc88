"""Fixtures of programs that attacks need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.local.control_plane import LocalControlPlane
from scripts.browser import ensure_browser
from scripts.cluster import binaries
from tests.support.programs import Programs, report
from tests.system.site import Site

_PROGRAMS = Programs(
    {
        "browser": lambda: ensure_browser(report),
        "temporal_program": lambda: binaries.ensure(report, (binaries.TEMPORAL_SERVER_SOURCE,))["temporal-server"],
    }
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Makes the programs that the tests ask for which are left."""
    _PROGRAMS.make(config, items)


@pytest.fixture(scope="session")
def browser() -> Path:
    """A real browser."""
    return _PROGRAMS.path("browser")


@pytest.fixture(scope="session")
def temporal_program() -> Path:
    """Temporal's server, which can ask for credentials; the dev server cannot."""
    return _PROGRAMS.path("temporal_program")


@pytest.fixture
async def site(tmp_path: Path, control_plane: LocalControlPlane) -> AsyncIterator[Site]:
    """The shared server and worker, and jobs of the test's own."""
    site = Site(tmp_path, control_plane)
    await site.start()
    try:
        yield site
    finally:
        await site.end_jobs()
