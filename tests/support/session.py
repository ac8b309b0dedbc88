"""A session of tests: its folder, the servers that all its processes share, and the end of every process it started.

The first process of a session, pytest itself, holds a pipe to a reaper. When the pipe closes, however pytest ended, the
reaper kills each process whose environment names the session's folder, and removes the folder: a session that is killed
leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.base.state_folder import StateFolder
from perdure.local.control_plane import LocalControlPlane
from tests.support import reaper
from tests.support.temporal_server import DevServer
from tests.support.warm_worker import warm_workers

FOLDER = "PYTEST_SESSION_FOLDER"
"""The variable with the session's folder, by which the reaper knows its processes."""

_DESCRIPTORS = 1024
"""The usual soft limit of open files, under which users run what is tested here."""

_REAPER = pytest.StashKey[subprocess.Popen[bytes]]()


def begin(config: pytest.Config) -> None:
    """Creates the folder and starts the reaper, in the session's first process; limits open files, in each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, hard))
    if worker_name(config):
        return
    folder = tempfile.mkdtemp(prefix="perdure-tests-")
    # Started before the variable is set: otherwise the reaper would be among the processes that it ends.
    config.stash[_REAPER] = subprocess.Popen(
        [sys.executable, "-S", "-E", reaper.__file__, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    os.environ[FOLDER] = folder


def end(config: pytest.Config) -> None:
    """Ends what the session has left, in its first process."""
    if process := config.stash.get(_REAPER, None):
        os.environ.pop(FOLDER, None)
        process.communicate()


def folder() -> Path:
    """Returns the session's folder."""
    return Path(os.environ[FOLDER])


def worker_name(config: pytest.Config) -> str:
    """Returns xdist's name of a process that runs tests, such as gw0; empty in a session's first process."""
    return getattr(config, "workerinput", {}).get("workerid", "")


@contextlib.contextmanager
def shared_server(config: pytest.Config) -> Iterator[DevServer]:
    """Yields the session's dev server, with a namespace of this process's own."""
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    server = DevServer(folder() / "temporal" / "temporal.db", namespaces=tuple(map(_namespace, range(processes))))
    server.namespace = _namespace(int(worker_name(config).removeprefix("gw") or 0))
    with _first("temporal") as is_first:
        record = server.database.with_suffix(".port")
        if is_first:
            server.database.parent.mkdir(exist_ok=True)
            asyncio.run(server.start())
            record.write_text(str(server.port))
        else:
            server.port = int(record.read_text())
    yield server


@contextlib.contextmanager
def shared_control_plane() -> Iterator[LocalControlPlane]:
    """Yields the session's server and worker of `perdure run`, in a state folder that all its processes share."""
    plane = LocalControlPlane(StateFolder(folder() / "plane"))
    saved = {variable: os.environ.pop(variable, None) for variable in ("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE")}
    try:
        with _first("plane"), warm_workers():
            asyncio.run(plane.ensure())
        yield plane
    finally:
        os.environ.update({variable: value for variable, value in saved.items() if value is not None})


@contextlib.contextmanager
def _first(what: str) -> Iterator[bool]:
    """Yields whether this is the first process here; the others wait until it has finished."""
    with (folder() / f"{what}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield os.fstat(lock.fileno()).st_size == 0
        lock.write("started\n")


def _namespace(number: int) -> str:
    return f"tests-{number}"
