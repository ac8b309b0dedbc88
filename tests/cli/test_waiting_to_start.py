"""Tests of `perdure run` while something else has to be done first: it says what it waits for, and Ctrl-C ends it."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from perdure.base.state_folder import StateFolder
from tests.docs.pages import ROOT
from tests.support.running_command import RunningCommand
from tests.support.waiting import wait_for
from tests.support.warm_process import warm_interpreter

GO = """#!/bin/sh
echo "$$" > "$TEST_GO_PID"
read line < "$TEST_NEVER"
"""


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """Another process holds a lock: this one."""
    lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(os.getpid()))
        file.flush()
        yield


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(GO)
    go.chmod(0o755)
    os.mkfifo(tmp_path / "never")
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{go.parent}:/usr/bin:/bin",
        "PERDURE_STATE": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TEMPORAL_ADDRESS": "",
        "PERDURE_TEMPORAL": "",
        "TEST_GO_PID": str(tmp_path / "go.pid"),
        "TEST_NEVER": str(tmp_path / "never"),
    }


@contextmanager
def run_command(tmp_path: Path, environment: dict[str, str]) -> Iterator[tuple[RunningCommand, Path]]:
    said = tmp_path / "said"
    with said.open("wb") as errors:
        interpreter = warm_interpreter("tests.support.command_imports")
        running = RunningCommand(
            interpreter.start(
                *("tests.cli.bare_machine", "run", "--", "true"),
                environment=environment,
                folder=tmp_path,
                output=errors.fileno(),
                errors=errors.fileno(),
            )
        )
    try:
        yield running, said
    finally:
        running.kill()
        running.wait()


def interrupt_when(told: str, running: RunningCommand, said: Path) -> None:
    """Presses Ctrl-C as soon as the command has said something."""
    wait_for(lambda: told in said.read_text() or running.poll() is not None)
    assert told in said.read_text()
    running.send_signal(signal.SIGINT)
    # Nothing of what it waited for has ended.
    assert running.wait() == 130, said.read_text()


def test_for_another_process_that_installs_temporal(tmp_path: Path, environment: dict[str, str]) -> None:
    with (
        held(tmp_path / "cache" / "perdure" / "temporal" / "lock"),
        run_command(tmp_path, environment) as (running, said),
    ):
        told = f"Waiting for process {os.getpid()}, which downloads or builds Temporal's CLI (0 s) ..."
        interrupt_when(told, running, said)


def test_for_another_command_that_starts_the_same_control_plane(tmp_path: Path, environment: dict[str, str]) -> None:
    StateFolder(tmp_path / "state").open()
    with held(tmp_path / "state" / "lock"), run_command(tmp_path, environment) as (running, said):
        told = f"Waiting for process {os.getpid()}, which starts or stops what runs from this state folder"
        interrupt_when(told, running, said)


def test_for_its_own_build_of_temporal(tmp_path: Path, environment: dict[str, str]) -> None:
    pid = tmp_path / "go.pid"
    with run_command(tmp_path, environment) as (running, said):
        go = int(wait_for(lambda: pid.exists() and pid.read_text().strip()))
        interrupt_when("Building Temporal's CLI", running, said)
    wait_for(lambda: not psutil.pid_exists(go))
