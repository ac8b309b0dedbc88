"""What all tests share: one real Temporal server per session, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio.client import Client

from tests.support.temporal_server import DevServer, shared_dev_server

_WITH_RANKS = ("system", "launcher")
"""Folders with most of the tests that start torch again and again, which takes a core each time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes two groups for runs in two processes, about equally long, and most tests with ranks in one of them."""
    folder = Path(__file__).parent
    for item in items:
        with_ranks = item.path.relative_to(folder).parts[0] in _WITH_RANKS
        item.add_marker(pytest.mark.xdist_group("with ranks" if with_ranks else "without"))


@pytest.fixture(scope="session")
def temporal_server() -> Iterator[DevServer]:
    """A Temporal dev server for tests that never stop it."""
    with shared_dev_server() as server:
        yield server


@pytest.fixture
async def temporal_client(temporal_server: DevServer) -> Client:
    """A client of the session's server, on the test's own event loop."""
    return await temporal_server.client()
