from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from temporalio.client import Client

from tests.support.temporal_server import DevServer
from tests.workflows.fleet import Fleet, running_fleet
from tests.workflows.ways import AS_WORKERS_DO

SHORT_RUN = 60
"""Events."""


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, temporal_client: Client) -> AsyncIterator[Fleet]:
    """Runs workflows in the way that the test asks for."""
    async with running_fleet(temporal_client, **getattr(request, "param", AS_WORKERS_DO)) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def server_of_short_runs() -> Iterator[DevServer]:
    """A server that soon suggests to each run that it continue as new."""
    suggest = ("--dynamic-config-value", f"limit.historyCount.suggestContinueAsNew={SHORT_RUN}")
    with tempfile.TemporaryDirectory(prefix="perdure-temporal-", ignore_cleanup_errors=True) as folder:
        server = DevServer(Path(folder) / "temporal.db", options=suggest)
        try:
            asyncio.run(server.start())
            yield server
        finally:
            server.kill()


@pytest.fixture
async def fleet_of_short_runs(server_of_short_runs: DevServer) -> AsyncIterator[Fleet]:
    """Its runs continue as new after a few events."""
    async with running_fleet(await server_of_short_runs.client()) as fleet:
        yield fleet
