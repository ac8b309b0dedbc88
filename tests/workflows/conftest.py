from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from temporalio.client import Client

from tests.workflows.fleet import Fleet, running_fleet
from tests.workflows.ways import AS_WORKERS_DO


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, temporal_client: Client) -> AsyncIterator[Fleet]:
    """Runs workflows in the way that the test asks for."""
    async with running_fleet(temporal_client, **getattr(request, "param", AS_WORKERS_DO)) as fleet:
        yield fleet
