"""Fixtures of the command line: with the shared control plane, or on a machine where nothing runs yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.base.state_folder import StateFolder
from perdure.client.sync import SyncClient
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import CommandLine, end_nodes
from tests.support.warm_agents import warm_name


@pytest.fixture
def command_line(control_plane: LocalControlPlane, tmp_path: Path) -> CommandLine:
    """The command line over the shared control plane, in a folder of the test's own."""
    return CommandLine.local(tmp_path, control_plane.state.path)


@pytest.fixture
def job_name() -> str:
    """A name of the test's own, of a job whose agents need not start cold."""
    return warm_name()


@pytest.fixture(scope="session")
def jobs(control_plane: LocalControlPlane) -> Iterator[SyncClient]:
    """The jobs of the shared control plane, for tests to wait on."""
    server = control_plane.status().server
    assert server is not None
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            # The address is that of this state folder's server, so the client finds its keys.
            patch.setenv("PERDURE_STATE", str(control_plane.state.path))
            client = stack.enter_context(SyncClient(address=server.address))
        yield client


@pytest.fixture
def bare_command_line(tmp_path: Path) -> Iterator[CommandLine]:
    """The command line on a machine where nothing of ours runs; nothing is left running."""
    state = StateFolder(tmp_path / "state")
    yield CommandLine.local(tmp_path, state.path)
    if state.server_record.exists():
        plane = LocalControlPlane(state)
        plane.kill_worker()
        plane.kill_server()
        end_nodes(state.path)
