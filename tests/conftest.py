"""What all tests share: one real Temporal server per session, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from temporalio.client import Client
from xdist.scheduler import LoadScopeScheduling

from tests.support.temporal_server import DevServer, shared_dev_server

_WITH_RANKS = ("tests/system/test_survival.py", "tests/launcher/")
"""Most of the tests that start torch again and again, which takes a core each time; half the time of all tests."""


class _TwoGroups(LoadScopeScheduling):
    """Makes two groups for runs in two processes, about equally long, and most tests with ranks in one of them."""

    def _split_scope(self, nodeid: str) -> str:
        return "with ranks" if nodeid.startswith(_WITH_RANKS) else "without"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _TwoGroups:
    """Has `pytest -n 2` share the tests out in that way."""
    return _TwoGroups(config, log)


@pytest.fixture(scope="session")
def temporal_server() -> Iterator[DevServer]:
    """A Temporal dev server for tests that never stop it."""
    with shared_dev_server() as server:
        yield server


@pytest.fixture
async def temporal_client(temporal_server: DevServer) -> Client:
    """A client of the session's server, on the test's own event loop."""
    return await temporal_server.client()
