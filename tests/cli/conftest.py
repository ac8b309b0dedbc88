"""One local control plane for all tests of the command line: real server, real worker, real nodes."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.local.control_plane import LocalControlPlane
from perdure.local.state import StateFolder
from perdure.sync import SyncClient
from tests.support.command_line import CommandLine, end_nodes

UNSET = {"TEMPORAL_ADDRESS": "", "TEMPORAL_NAMESPACE": "", "PERDURE_NAMESPACE": "", "COLUMNS": "100"}


@pytest.fixture(scope="session")
def control_plane() -> Iterator[LocalControlPlane]:
    """A server and a worker that run until the session ends; tests use names of their own."""
    with tempfile.TemporaryDirectory(prefix="perdure-cli-", ignore_cleanup_errors=True) as name:
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


@pytest.fixture
def command_line(control_plane: LocalControlPlane, tmp_path: Path) -> CommandLine:
    """The command line over the shared control plane, in a folder of the test's own."""
    return CommandLine(tmp_path, {**UNSET, "PERDURE_STATE": str(control_plane.state.path)})


@pytest.fixture
def jobs(control_plane: LocalControlPlane) -> Iterator[SyncClient]:
    """The jobs of the shared control plane, for tests to wait on."""
    server = control_plane.status().server
    assert server is not None
    with SyncClient(address=server.address) as client:
        yield client


@pytest.fixture
def bare_command_line(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line on a machine where nothing of ours runs; nothing is left running."""
    state = StateFolder(tmp_path / "state")
    yield CommandLine(tmp_path, {**UNSET, "PERDURE_STATE": str(state.path)})
    if state.server_record.exists():
        plane = LocalControlPlane(state)
        plane.kill_worker()
        plane.kill_server()
        end_nodes(state.path)


@pytest.fixture
def job_name() -> str:
    return f"job-{secrets.token_hex(4)}"
