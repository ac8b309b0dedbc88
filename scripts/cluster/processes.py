"""The cluster's processes: starts each once, distinguishes it from later processes with its PID, and ends only it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil


class Processes:
    """Long-lived processes that outlive the process that started them, recorded in a folder."""

    def __init__(self, *, records: Path, logs: Path) -> None:
        self._records = records
        self._logs = logs

    def start(self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> None:
        """Starts a process in its own session; its output goes to the log with its name."""
        self._records.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            pid = os.posix_spawn(
                command[0],
                [str(word) for word in command],
                {**os.environ, **(environment or {})},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    *((os.POSIX_SPAWN_DUP2, log.fileno(), number) for number in (1, 2)),
                    # Such as the lock of a `flock` that this process runs under: it would be held until the end.
                    *((os.POSIX_SPAWN_CLOSE, number) for number in _inherited_descriptors()),
                ],
                setsid=True,
            )
        record = {"pid": pid, "created": psutil.Process(pid).create_time()}
        (self._records / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def find(self, name: str) -> psutil.Process | None:
        """Returns the process; None if it does not run."""
        try:
            record = json.loads((self._records / f"{name}.json").read_text(encoding="utf-8"))
            process = psutil.Process(record["pid"])
            alive = abs(process.create_time() - record["created"]) < 0.1 and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, ValueError, psutil.NoSuchProcess):
            return None
        return process if alive else None

    def names(self) -> list[str]:
        """Returns the names of all processes that were started."""
        return sorted(path.stem for path in self._records.glob("*.json"))

    def ended_processes(self) -> list[str]:
        """Returns the names of processes that should run and do not."""
        return [name for name in self.names() if self.find(name) is None]

    def kill(self, *names: str) -> None:
        """Sends SIGKILL. Returns when the processes have ended; `ended` does not report them any more."""
        kill_all(process for name in names if (process := self.find(name)))
        for name in names:
            (self._records / f"{name}.json").unlink(missing_ok=True)


def _inherited_descriptors() -> list[int]:
    """Returns the descriptors that a child process would have besides standard input, output and error."""
    found: list[int] = []
    for number in map(int, os.listdir("/proc/self/fd")):
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            if number > 2 and os.get_inheritable(number):
                found.append(number)
    return found


def kill_all(processes: Iterable[psutil.Process], *, within: float = 20.0) -> None:
    """Sends SIGKILL. Returns when all processes have ended, whether or not their parents have reaped them.

    Raises:
        TimeoutError: if one does not end.
    """
    deadline = time.monotonic() + within
    with contextlib.ExitStack() as opened:
        descriptors: list[int] = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                descriptor = os.pidfd_open(process.pid)
                opened.callback(os.close, descriptor)
                # Checked after opening: the pidfd now refers to one process, even if the PID is used again.
                if process.is_running():
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    descriptors.append(descriptor)
        for descriptor in descriptors:
            # Not `select`, which takes no descriptor above 1,023.
            ending = select.poll()
            ending.register(descriptor, select.POLLIN)
            if not ending.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"killed processes do not end within {within:.0f} s")


def await_that(condition: Callable[[], bool], *, what: str, within: float, pause: float = 0.1) -> None:
    """Polls until the condition holds, for conditions without an event to wait for.

    Raises:
        TimeoutError: if the condition does not hold in time; `what` names it.
    """
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {within:.0f} s")
        time.sleep(pause)
