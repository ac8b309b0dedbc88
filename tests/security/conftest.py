"""The site that attacks are tried on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.local.control_plane import LocalControlPlane
from tests.system.site import Site


@pytest.fixture
async def site(tmp_path: Path, control_plane: LocalControlPlane) -> AsyncIterator[Site]:
    """The shared server and worker, and jobs of the test's own."""
    site = Site(tmp_path, control_plane)
    await site.start()
    try:
        yield site
    finally:
        await site.end_jobs()
