"""What all tests share: a real Temporal server and a whole local Perdure per process of the session."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from xdist.scheduler import LoadScopeScheduling

from perdure.local.control_plane import LocalControlPlane
from perdure.local.state import StateFolder
from tests.support.command_line import end_nodes
from tests.support.temporal_server import DevServer, shared_dev_server

_WITH_RANKS = ("tests/benchmarks/", "tests/launcher/", "tests/system/")
"""Most of the tests that start torch again and again, which takes a core each time; half the time of all tests."""


class _TwoGroups(LoadScopeScheduling):
    """Makes two groups for runs in two processes, about equally long.

    Most tests with ranks are in one. Those of a cluster are in the other: there is one cluster, and they wait for it
    two thirds of their time.
    """

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


@pytest.fixture(scope="session")
def control_plane() -> Iterator[LocalControlPlane]:
    """What `perdure run` starts, server and worker, for tests that never stop them; jobs have names of their own."""
    with tempfile.TemporaryDirectory(prefix="perdure-local-", ignore_cleanup_errors=True) as name:
        plane = LocalControlPlane(StateFolder(Path(name) / "state"))
        saved = {variable: os.environ.pop(variable, None) for variable in ("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE")}
        try:
            asyncio.run(plane.ensure())
            yield plane
        finally:
            plane.kill_worker()
            plane.kill_server()
            end_nodes(plane.state.path)
            os.environ.update({variable: value for variable, value in saved.items() if value is not None})
