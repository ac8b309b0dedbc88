"""Runs the command line like users and scripts: as a separate process, on a pipe or a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import wait_for

STEPS = f"{sys.executable} -c 'from perdure_training import report; report(step=1)'"
"""For a shell: a step. A job runs from its first one; without any, when its ranks have lived for some seconds."""

PERDURE = (sys.executable, "-P", "-m", "perdure.cli.main")

_UNSET = {"TEMPORAL_ADDRESS": "", "TEMPORAL_NAMESPACE": "", "PERDURE_NAMESPACE": "", "COLUMNS": "100"}


@dataclass
class Finished:
    """The output and exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class CommandLine:
    """Runs commands in one folder with one environment."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def local(cls, folder: Path, state: Path) -> CommandLine:
        """In a folder, over the local control plane of a state folder."""
        return cls(folder, {**_UNSET, "PERDURE_STATE": str(state)})

    def run(self, *arguments: str, within: float = 120, program: Sequence[str] = PERDURE) -> Finished:
        done = subprocess.run(
            [*program, *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
        )
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*PERDURE, *arguments],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def on_terminal(self, *arguments: str, program: Sequence[str] = PERDURE, columns: int = 100) -> Terminal:
        environment = {**os.environ, **self.environment, "COLUMNS": str(columns)}
        return Terminal([*program, *arguments], folder=self.folder, environment=environment, columns=columns)

    def write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.write_text(content, encoding="utf-8")
        return path


class Terminal:
    """A command on a terminal."""

    def __init__(self, command: list[str], *, folder: Path, environment: Mapping[str, str], columns: int) -> None:
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], command, {**environment, "TERM": "xterm-256color"})
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.raw = ""

    @property
    def text(self) -> str:
        """All that was drawn, without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw)

    def expect(self, words: str, *, within: float = 90) -> None:
        """Reads until the words have been drawn."""
        deadline = time.monotonic() + within
        while words not in self.text:
            if not self._read(deadline):
                raise AssertionError(f"{words!r} was not drawn, but: {self.text[-3000:]}")

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def leave(self, *, within: float = 30) -> int:
        """Waits for the command to end, and returns its exit code."""
        deadline = time.monotonic() + within
        while self._read(deadline):
            pass

        def ended() -> tuple[int, int] | None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return (pid, status) if pid else None

        _, status = wait_for(ended, within=within, what=lambda: f"the command leaves: {self.text[-3000:]}")
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(status)

    def _read(self, deadline: float) -> bool:
        """Takes what is there to read; False where the command has closed the terminal, or it is too late."""
        ready, _, _ = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            chunk = os.read(self._terminal, 65536)
        except OSError:
            return False
        self.raw += chunk.decode(errors="replace")
        return bool(chunk)


def end_nodes(state: Path) -> None:
    """Kills the local nodes of a state folder, whose worker may be gone."""
    mark = f"={state}/".encode()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and process.pid != os.getpid():
                process.kill()
