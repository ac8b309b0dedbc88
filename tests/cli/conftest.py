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
from tests.support.command_line import CommandLine

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
            os.environ.update({variable: value for variable, value in saved.items() if value is not None})


@pytest.fixture
def command_line(control_plane: LocalControlPlane, tmp_path: Path) -> CommandLine:
    """The command line over the shared control plane, in a folder of the test's own."""
    return CommandLine(tmp_path, {**UNSET, "PERDURE_STATE": str(control_plane.state.path)})


@pytest.fixture
def bare_command_line(tmp_path: Path) -> CommandLine:
    """The command line on a machine where nothing of ours runs."""
    return CommandLine(tmp_path, {**UNSET, "PERDURE_STATE": str(tmp_path / "state")})


@pytest.fixture
def job_name() -> str:
    return f"job-{secrets.token_hex(4)}"
