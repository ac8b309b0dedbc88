from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from temporalio.client import Client

from tests.workflows.fleet import Fleet, running_fleet


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, temporal_client: Client) -> AsyncIterator[Fleet]:
    """Keeps as many workflows in memory as the test asks for."""
    async with running_fleet(temporal_client, max_cached_workflows=getattr(request, "param", 1000)) as fleet:
        yield fleet
