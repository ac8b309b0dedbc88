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

_GROUPS = {
    "tests/kubernetes/": "of a cluster",
    "tests/launcher/": "with ranks",
    "tests/system/test_survival.py": "with ranks",
}
"""The tests of a group run one after another. Those of a cluster share it, and mostly wait for its pods; most of those
that start torch again and again, which takes a core each time, do not meet in this way; all others are the third."""


class _Groups(LoadScopeScheduling):
    """Makes three groups for runs in three processes, about equally long."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for path, group in _GROUPS.items() if nodeid.startswith(path)), "of neither")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups:
    """Has `pytest -n 3` share the tests out in that way."""
    return _Groups(config, log)


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
