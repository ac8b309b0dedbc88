"""Tests of the signal to a rank whose leader would end before the processes that handle it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure_launcher.system import processes
from perdure_launcher.system.program_signals import continue_child, signal_child
from tests.support.waiting import wait_for

CHILD = """
import pathlib, signal, sys
folder = pathlib.Path(sys.argv[1])
def save(*_):
    (folder / "signaled").touch()
    while not (folder / "may save").exists():
        signal.sigtimedwait([], 0.01)
    (folder / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(folder / "ready").touch()
while True:
    signal.pause()
"""
WRAPPER = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


@pytest.fixture
def wrapper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WRAPPER, CHILD, str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            wait_for((tmp_path / "ready").exists)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def pending(pid: int) -> set[signal.Signals]:
    """The signals that wait for a process."""
    lines = processes.read_file(pid, "status").decode().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return {number for number in signal.Signals for mask in masks if mask >> (number - 1) & 1}


def test_a_wrapper_is_signaled_when_the_processes_that_handle_the_signal_have_ended(
    wrapper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (handling,) = signal_child(wrapper.pid, signal.SIGTERM)
    try:
        wait_for((tmp_path / "signaled").exists)
        wait_for(lambda: (known := processes.read_process(wrapper.pid)) is not None and known.state == "T")
        # It would take this signal before the one that stops it, had it not been stopped yet.
        assert signal.SIGTERM not in pending(wrapper.pid)
        (tmp_path / "may save").touch()
        ended = select.poll()
        ended.register(handling, select.POLLIN)
        assert ended.poll(60_000)
    finally:
        os.close(handling)
    assert (tmp_path / "saved").exists()
    assert wrapper.poll() is None
    continue_child(wrapper.pid, signal.SIGTERM)
    assert wrapper.wait(60) == -signal.SIGTERM
