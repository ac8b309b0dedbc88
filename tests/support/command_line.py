"""Runs the command line like users and scripts: as a separate process, on a pipe or a terminal."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support import running_command
from tests.support.running_command import Child, Process, RunningCommand
from tests.support.waiting import DEADLINE, wait_for

STEPS = f"{shlex.quote(sys.executable)} -c 'from perdure_training import report; report(step=1)'"
"""For a shell: a step. A job runs from its first one; without any, when its ranks have lived for some seconds."""

PERDURE = (sys.executable, "-P", "-m", "perdure.cli.main")
"""`perdure` as users start it, in a new interpreter."""

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
    """Runs commands in one folder with one environment.

    Without a `program`, it is `perdure`, in a process that is forked from an interpreter which has imported it. Tests
    of what a new interpreter does name `PERDURE`.
    """

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def local(cls, folder: Path, state: Path) -> CommandLine:
        """In a folder, over the local control plane of a state folder."""
        return cls(folder, {**_UNSET, "PERDURE_STATE": str(state)})

    def run(self, *arguments: str, within: float = DEADLINE, program: Sequence[str] = ()) -> Finished:
        """Runs a command without input."""
        environment = {**os.environ, **self.environment}
        if not program and running_command.is_forked(environment):
            return Finished(*running_command.run(arguments, self.folder, environment, within=within))
        done = subprocess.run(
            [*(program or PERDURE), *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
        )
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)

    def start(self, *arguments: str, program: Sequence[str] = ()) -> RunningCommand | subprocess.Popen[str]:
        """Starts a command without input, with its errors among its output."""
        environment = {**os.environ, **self.environment}
        if not program and running_command.is_forked(environment):
            return RunningCommand.start(arguments, self.folder, environment)
        return subprocess.Popen(
            [*(program or PERDURE), *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def on_terminal(self, *arguments: str, program: Sequence[str] = (), columns: int = 100) -> Terminal:
        """Starts a command on a terminal of its own."""
        environment = {**os.environ, **self.environment, "COLUMNS": str(columns), "TERM": "xterm-256color"}
        if not program and running_command.is_forked(environment):
            master, slave = pty.openpty()
            _set_size(master, columns)
            try:
                return Terminal(running_command.fork(arguments, self.folder, environment, slave, slave), master)
            finally:
                os.close(slave)
        pid, master = pty.fork()
        if pid == 0:
            program = program or PERDURE
            os.chdir(self.folder)
            os.execvpe(program[0], [*program, *arguments], environment)
        _set_size(master, columns)
        return Terminal(Child(pid), master)

    def write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.write_text(content, encoding="utf-8")
        return path


def _set_size(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


class Terminal:
    """A command on a terminal, which hangs up once no one refers to it."""

    def __init__(self, process: Process, master: int) -> None:
        self._process = process
        self._master = master
        self._hang_up = weakref.finalize(self, os.close, master)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pid = process.pid
        self.raw = ""

    @property
    def text(self) -> str:
        """All that was drawn, without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw)

    def expect(self, words: str, *, within: float = DEADLINE) -> None:
        """Reads until the words have been drawn."""
        deadline = time.monotonic() + within
        while words not in self.text:
            if not self._read(deadline):
                raise AssertionError(f"{words!r} was not drawn, but: {self.text[-3000:]}")

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def leave(self, *, within: float = DEADLINE) -> int:
        """Waits for the command to end, and returns its exit code."""
        deadline = time.monotonic() + within
        while self._read(deadline):
            pass
        wait_for(
            lambda: self._process.returncode is not None,
            within=within,
            what=lambda: f"the command leaves: {self.text[-3000:]}",
        )
        self._hang_up()
        code = self._process.returncode
        assert code is not None
        return code

    def _read(self, deadline: float) -> bool:
        """Takes what is there to read; False where the command has closed the terminal, or it is too late."""
        # Unlike `select`, it takes any descriptor.
        waiting = select.poll()
        waiting.register(self._master, select.POLLIN)
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        try:
            chunk = os.read(self._master, 65536)
        except OSError:
            return False
        self.raw += self._decoder.decode(chunk)
        return bool(chunk)


def end_nodes(state: Path) -> None:
    """Kills the local nodes of a state folder, whose worker may be gone."""
    mark = f"={state}/".encode()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and process.pid != os.getpid():
                process.kill()
