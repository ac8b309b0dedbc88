from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from perdure.local.control_plane import LocalControlPlane
from perdure.state_folder import StateFolder
from tests.system.site import Site


@pytest.fixture
async def site(tmp_path: Path, control_plane: LocalControlPlane) -> AsyncIterator[Site]:
    """The shared server and worker, which such tests leave alone, and jobs of the test's own."""
    async with _started(Site(tmp_path, control_plane)) as site:
        yield site


@pytest.fixture
async def own_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """A Perdure of the test's own, which it may kill; nothing of it is left."""
    monkeypatch.delenv("TEMPORAL_ADDRESS", raising=False)
    plane = LocalControlPlane(StateFolder(tmp_path / "state"))
    try:
        async with _started(Site(tmp_path, plane)) as site:
            yield site
    finally:
        await plane.stop_worker()
        await plane.stop_server()


@asynccontextmanager
async def _started(site: Site) -> AsyncGenerator[Site]:
    await site.start()
    try:
        yield site
    finally:
        await site.end_jobs()
