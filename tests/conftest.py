"""Shared fixtures of all tests: a real Temporal server and a complete local Perdure per process of the session."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import subprocess
import tempfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from temporalio.client import Client
from xdist.scheduler import LoadScopeScheduling

from perdure.base.state_folder import StateFolder
from perdure.local.control_plane import LocalControlPlane
from tests.support.command_line import end_nodes
from tests.support.temporal_server import DevServer, shared_dev_server

# Workers would keep a history of each test's jobs: those that need one name its database.
os.environ.setdefault("PERDURE_HISTORY", "off")
# And watch this machine: those that need it say so.
os.environ.setdefault("PERDURE_CLUSTER", "off")
# An example's time says nothing on a busy machine: each test has its own limit.
settings.register_profile("without-deadlines", deadline=None)
settings.load_profile("without-deadlines")

collect_ignore = ["gpu"]
"""`make test-gpu` names the folder, which is then collected."""

_WITH_RANKS = (
    *("corners", "env_mode", "frameworks", "kinds_of_scripts", "launchers", "networks", "stages", "step_counter"),
    *("torch_events", "torchrun_worlds", "warm_standbys", "warm_starts"),
)
_NEEDS = {
    "cluster": ("tests/kubernetes/", "tests/security/cluster/"),
    "ranks": ("tests/benchmarks/", "tests/system/", *(f"tests/launcher/test_{name}.py" for name in _WITH_RANKS)),
}
"""Tests by what they need, as folders and files: there is only one cluster, and ranks import torch repeatedly, which
takes a core each time. All other tests need at most a Temporal server."""

_LONGEST = ("tests/workflows/", "tests/cli/", "tests/agent/", "tests/security/", "tests/policy/")
"""The longest of the other tests: they start first, so that no process has one of them left at the end."""

_CORES_PER_RANKS = 2
"""Processes with ranks beside each other: one for so many cores."""

LONG = (
    "launchers",
    "frameworks",
    "warm-starts",
    "joining",
    "survival",
    "exactness",
    "cluster-faults",
    "storage",
    "workflows",
    "commands",
    "metrics",
    "silent-faults",
    "roles",
    "tensorflow",
    "ray",
    "history",
    "page",
)
"""Groups of tests that are too long for each run. `.ci/run` adds one by turn."""


class _ByNeed(LoadScopeScheduling):
    """Shares files out among processes: those that need the same thing go to one process, in a row."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        match _need(file):
            case "cluster":
                return "cluster"
            case "ranks":
                return f"ranks {zlib.crc32(file.encode()) % max((os.cpu_count() or 1) // _CORES_PER_RANKS, 1)}"
            case _:
                return file


def _need(file: str) -> str:
    return next((need for need, folders in _NEEDS.items() if file.startswith(folders)), "server")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByNeed:
    """Has `pytest -n` share the tests out in that way."""
    config.option.loadscopereorder = False
    return _ByNeed(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--long`."""
    parser.addoption(
        "--long",
        default="with",
        choices=("with", "without", "only", "by-commit", *LONG),
        help="long tests: with them, without them, only them, or only one group of them; by-commit: one by turn",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without collections of garbage: they took half of its time, since what is collected stays.

    Nor are the tests to search through it again with each of theirs.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what `--long` leaves out, and puts first what takes a process for longest."""
    groups = {item: _long_group(item) for item in items}
    match config.getoption("--long"):
        case "with":
            kept = items[:]
        case "without":
            kept = [item for item in items if groups[item] is None]
        case "only":
            kept = [item for item in items if groups[item] is not None]
        case chosen:
            group = _group_by_turn() if chosen == "by-commit" else chosen
            print(f"long tests: {group}")
            kept = [item for item in items if groups[item] == group]
    without = set(items) - set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in without])
    order = [*_NEEDS, "server"]
    items[:] = sorted(kept, key=lambda item: (order.index(_need(item.nodeid)), not item.nodeid.startswith(_LONGEST)))


def _long_group(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("long")
    if marker is None:
        return None
    [group] = marker.args
    assert group in LONG, f"{item.nodeid}: {group} is not a group of long tests; tests/conftest.py names them"
    return group


def _group_by_turn() -> str:
    """Another one for nearly every commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return LONG[int(commit or "0", 16) % len(LONG)]


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
    """The server and worker of `perdure run`, for tests that never stop them; each job has its own name."""
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


@pytest.fixture(scope="session")
def ranks() -> None:
    """Asked for by tests whose processes import torch: each takes a core for seconds, so they run one after another."""


@pytest.fixture(scope="session")
def built_programs() -> None:
    """Asked for by fixtures of programs that the package registry lacks: their tests belong to `make test-cluster`."""


@pytest.fixture
def job_name() -> str:
    """A name of the test's own."""
    return f"job-{secrets.token_hex(4)}"
