"""What all tests share: how a session begins, selects and ends, and its servers."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings
from temporalio.client import Client

from perdure.local.control_plane import LocalControlPlane
from tests.support import descriptors, programs, selection, session
from tests.support.temporal_server import DevServer

pytest_plugins = ["tests.support.program_fixtures"]

# Workers would keep a history of each test's jobs: those that need one name its database.
os.environ.setdefault("PERDURE_HISTORY", "off")
# And watch this machine: those that need it say so.
os.environ.setdefault("PERDURE_CLUSTER", "off")
# For each connection torch asks the name server for the name of 127.0.0.1. One that drops a question among many at once
# would cost it 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# An example's time says nothing on a busy machine: each test has its own limit. CI tries four times as many examples.
settings.register_profile("thorough", deadline=None)
settings.register_profile("usual", deadline=None, max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))

collect_ignore = ["gpu"]
"""`make test-gpu` names the folder, which is then collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that select tests."""
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Begins the session."""
    session.begin(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends what the session has left."""
    session.end(config)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> selection.ByNeed:
    """Has `pytest -n` share the tests out by what they need."""
    config.option.loadscopereorder = False
    return selection.ByNeed(config, log)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Names the group of long tests that this commit runs."""
    if config.getoption("--long") == "by-commit":
        return f"long tests: {selection.group_by_turn(config)}"
    return None


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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests, orders the others, and notes their needs before this process reports that it has collected."""
    selection.select(config, items)
    selection.write_needs(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes the programs that the tests which are left ask for."""
    config = session.config
    if not config.option.collectonly:
        programs.make(config, session.items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Compares what is open after the tests of a file with what was open before."""
    descriptors.note_file(item)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Fails the last test of a file whose tests leave descriptors open."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        descriptors.check_file(item)
    return result


@pytest.fixture(scope="session")
def temporal_server(pytestconfig: pytest.Config) -> Iterator[DevServer]:
    """A Temporal dev server for tests that never stop it, with a namespace of this process's own."""
    with session.shared_server(pytestconfig) as server:
        yield server


@pytest.fixture
async def temporal_client(temporal_server: DevServer) -> Client:
    """A client of the session's server, on the test's own event loop."""
    return await temporal_server.client()


@pytest.fixture(scope="session")
def control_plane() -> Iterator[LocalControlPlane]:
    """The server and worker of `perdure run`, for tests that never stop them; each job has its own name."""
    with session.shared_control_plane() as plane:
        yield plane


@pytest.fixture(scope="session")
def ranks() -> None:
    """Asked for by tests whose processes import torch: each takes a core for seconds, so they run one after another."""


@pytest.fixture
def job_name() -> str:
    """A name of the test's own."""
    return f"job-{secrets.token_hex(4)}"
