"""Commands of `perdure` that run, in processes forked from an interpreter that has imported it.

A command that is started cold takes a second of processor time before it begins. A forked one has its own memory,
environment, working directory, session and terminal, and ends like any other.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tests.support.waiting import DEADLINE
from tests.support.warm_process import WarmProcess, warm_interpreter

_READ_AT_START = ("PYTHON", "LC_", "LANG", "TZ", "LD_", "MALLOC_")
"""Beginnings of the names of variables that an interpreter, or a library that it loads, reads when it starts."""

_READ_AT_IMPORT = ("TYPER_", "_TYPER_", "TERMINAL_WIDTH", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
"""Likewise, of those that a module reads when it is imported."""

_of_interpreter: dict[str, str] = {}
_starting = threading.Lock()


class Process(Protocol):
    """A process that a test has started."""

    pid: int

    @property
    def returncode(self) -> int | None: ...


def is_forked(environment: Mapping[str, str]) -> bool:
    """Returns whether a forked process is the same as a new one, in this environment."""
    # Apple's frameworks forbid forks without an exec.
    return sys.platform != "darwin" and _read_early(environment) == (_of_interpreter or _read_early(os.environ))


def fork(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], output: int, errors: int
) -> WarmProcess:
    """Starts `perdure` with these descriptors; on a terminal, if the output is one."""
    with _starting:
        if not _of_interpreter:
            _of_interpreter.update(_read_early(os.environ))
        interpreter = warm_interpreter("tests.support.command_imports")
        return interpreter.start(
            "tests.support.warm_command",
            *arguments,
            environment=environment,
            folder=folder,
            output=output,
            errors=errors,
        )


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START + _READ_AT_IMPORT)}


def run(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], *, within: float
) -> tuple[int, str, str]:
    """Runs `perdure`, and returns its exit code, output and errors.

    Raises:
        subprocess.TimeoutExpired: if it takes longer; it is killed.
    """
    output, write_output = os.pipe()
    errors, write_errors = os.pipe()
    with os.fdopen(output, "rb"), os.fdopen(errors, "rb"):
        try:
            process = fork(arguments, folder, environment, write_output, write_errors)
        finally:
            os.close(write_output)
            os.close(write_errors)
        content = {output: b"", errors: b""}
        deadline = time.monotonic() + within
        with selectors.PollSelector() as reading:
            for descriptor in content:
                reading.register(descriptor, selectors.EVENT_READ)
            while reading.get_map():
                ready = reading.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    process.kill()
                    raise subprocess.TimeoutExpired(list(arguments), within, content[output], content[errors])
                for key, _ in ready:
                    part = os.read(key.fd, 65536)
                    content[key.fd] += part
                    if not part:
                        reading.unregister(key.fd)
    shown, problems = map(_decode, content.values())
    return RunningCommand(process).wait(max(deadline - time.monotonic(), 0)), shown, problems


def _decode(content: bytes) -> str:
    return content.decode().replace("\r\n", "\n")


class RunningCommand:
    """A command whose output a test reads while it runs, with the methods of `subprocess.Popen`."""

    def __init__(self, process: WarmProcess, output: int | None = None) -> None:
        self._process = process
        self.pid = process.pid
        self.stdout = None if output is None else os.fdopen(output, encoding="utf-8")

    @classmethod
    def start(cls, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> RunningCommand:
        """Starts `perdure` with its output and its errors on one pipe."""
        output, write = os.pipe()
        try:
            return cls(fork(arguments, folder, environment, write, write), output)
        finally:
            os.close(write)

    def __enter__(self) -> RunningCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stdout:
            self.stdout.close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.returncode

    def wait(self, timeout: float = DEADLINE) -> int:
        if not self._process.ends_within(timeout):
            raise subprocess.TimeoutExpired("perdure", timeout)
        code = self._process.returncode
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class Child:
    """A process that this one has forked."""

    pid: int
    _code: int | None = None

    @property
    def returncode(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code
