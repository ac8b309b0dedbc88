"""What all tests share: one real Temporal server per session, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from temporalio.client import Client

from tests.support.temporal_server import DevServer, shared_dev_server

_LONGEST_FIRST = ("system", "workflows", "cli", "launcher", "agent", "importers")
"""Their files run for minutes; one that is begun last keeps one process busy when the other has nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders folders by how long they take."""
    folder = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = item.path.relative_to(folder).parts[0]
        return _LONGEST_FIRST.index(name) if name in _LONGEST_FIRST else len(_LONGEST_FIRST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def temporal_server() -> Iterator[DevServer]:
    """A Temporal dev server for tests that never stop it."""
    with shared_dev_server() as server:
        yield server


@pytest.fixture
async def temporal_client(temporal_server: DevServer) -> Client:
    """A client of the session's server, on the test's own event loop."""
    return await temporal_server.client()
