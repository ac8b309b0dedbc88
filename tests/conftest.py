"""What all tests share: one real Temporal server per session, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from temporalio.client import Client

from tests.support.temporal_server import DevServer, shared_dev_server


@pytest.fixture(scope="session")
def temporal_server() -> Iterator[DevServer]:
    """A Temporal dev server for tests that never stop it."""
    with shared_dev_server() as server:
        yield server


@pytest.fixture
async def temporal_client(temporal_server: DevServer) -> Client:
    """A client of the session's server, on the test's own event loop."""
    return await temporal_server.client()
