from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.system.site import Site, running_site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """A Perdure of the test's own: some tests kill its server."""
    async with running_site(tmp_path) as site:
        yield site
