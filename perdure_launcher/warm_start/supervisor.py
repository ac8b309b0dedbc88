"""Keeps one warm interpreter beside the process that starts ranks: torchrun's rendezvous handler, or the launcher
itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ..system.processes import begin_child, environment_of, read_process
from .names import ALL_COLD, EXECUTABLE_VARIABLE, FOLDER_VARIABLE, LEARNED, PID, PYTHON_VARIABLE, REFUSAL, SOCKET, WARM
from .plan import START, Plan

logger = logging.getLogger(__name__)

PREPARATION = timedelta(seconds=30)
"""How long a node may prepare before it joins an elastic job; the others train on meanwhile."""

_STAND_IN = "python"
_LOG = "log"

_BACKLOG = 128
SETTLING = timedelta(seconds=60)
"""After a start of ranks that do not show their first step, their imports are over."""

_MOST_STARTS = 3
"""A warm interpreter that dies again and again (the node's memory, say) is not started again forever."""

_LONGEST_INTERPRETER = 120
"""Older kernels cut a script's first line off after 127 bytes."""
_PACKAGE = Path(__file__).parent.parent

_STAND_IN_PROGRAM = """\
#!{python} -IS
import sys

sys.path.insert(0, {package!r})

from perdure_launcher.warm_start.shim import main

main()
"""

# Python itself would continue with the script where this raised, which then ran outside any world.
_SITECUSTOMIZE = """\
try:
    from perdure_launcher.warm_start.interpreter import wait_to_become_a_rank

    wait_to_become_a_rank()
except BaseException:
    import os
    import traceback

    traceback.print_exc()
    os._exit(1)
"""


def offer(folder: Path, environment: MutableMapping[str, str], *, python: str = sys.executable) -> str:
    """Has ranks started through the stand-in: by a torchrun with this environment, or by a process that starts its
    executable.

    Returns:
        Why that is not possible; empty where it is.
    """
    if EXECUTABLE_VARIABLE in environment:
        return f"{EXECUTABLE_VARIABLE} is set in the job's environment"
    if len(os.fsencode(python)) > _LONGEST_INTERPRETER or any(map(str.isspace, python)):
        return f"{python} cannot stand in a script's first line"
    try:
        stand_in = prepare(folder, python)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    if not os.access(stand_in, os.X_OK):
        return f"{stand_in} cannot be executed on this node"
    (folder / ALL_COLD).unlink(missing_ok=True)
    environment[EXECUTABLE_VARIABLE] = str(stand_in)
    environment[PYTHON_VARIABLE] = python
    environment[FOLDER_VARIABLE] = str(folder)
    return ""


@dataclass(frozen=True)
class Preparation:
    """A warm interpreter that is ready to be started."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    listening: int
    """The descriptor to pass on."""
    log: int
    """The descriptor for its output."""


class WarmKeeper:
    """Starts the warm interpreter, and again where it has died.

    Keepers follow each other in one folder, as the launcher starts ahead what torchrun's handler then keeps: one that
    finds an interpreter which stands for the same leaves it as it is.
    """

    def __init__(
        self, *, folder: Path, python: str, plan: Plan, spawn: Callable[[Preparation], int] | None = None
    ) -> None:
        """Creates the keeper.

        Args:
            folder: As it was given to `offer`.
            python: The interpreter that ranks are to run in.
            plan: What it stands for.
            spawn: Starts a process and gives its ID, for a caller that looks after it. By default it is a child of the
                calling thread, which then must outlive the ranks: the kernel ends the interpreter, and with it its
                ranks, when that thread ends.
        """
        self._folder = folder
        self._python = python
        self._plan = plan
        self._spawn = spawn or self._spawn_child
        self._child: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._due: float | None = None
        """When one that has died is started again at the latest, on the monotonic clock."""

    def ensure(self) -> None:
        """Starts the warm interpreter where none runs; returns before it is warm. Never raises: ranks start anyway."""
        if self._child is not None:
            self._child.poll()
        if self._stands() or self._starts >= _MOST_STARTS or (self._starts and (self._folder / REFUSAL).exists()):
            return
        self._starts += 1
        try:
            prepare(self._folder, self._python)
            self._start()
        except Exception as error:
            logger.warning("ranks start cold: the warm interpreter cannot be started: %s", error)

    def start_ranks(self) -> bool:
        """To be called before ranks are started again.

        Where the interpreter has died they start cold at once. A new one would take longer for its imports than a rank
        does, and beside starting ranks it would compete with them: `follow_ranks` starts it when they are done.

        Returns:
            Whether `follow_ranks` has something to do.
        """
        if self._child is not None:
            self._child.poll()
        if not self._stands():
            self._due = time.monotonic() + SETTLING.total_seconds()
        return self._due is not None

    def follow_ranks(self, stepped: Callable[[], bool]) -> None:
        """Starts an interpreter that has died again, once ranks have made their first steps."""
        if self._due is not None and (time.monotonic() >= self._due or stepped()):
            self._due = None
            self.ensure()

    def wait_until_warm(self, patience: timedelta) -> bool:
        """Waits until ranks can be forked; False where they cannot be, or not within that time."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(patience.total_seconds())
                connection.connect(str(self._folder / SOCKET))
                connection.sendall(b"{}\n")
                return bool(connection.recv(len(WARM)))
        except OSError:
            return False

    def close(self) -> None:
        """Ends the warm interpreter if it is this keeper's child, and whatever ranks of it are left."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGKILL)
            self._child.wait()

    def _stands(self) -> bool:
        """Whether an interpreter runs that stands for the same; one that does not is ended."""
        try:
            pid = int((self._folder / PID).read_text(encoding="utf-8"))
            process = read_process(pid)
            if process is None or process.zombie or environment_of(pid).get(FOLDER_VARIABLE) != str(self._folder):
                return False
            plan = Plan.of_process(pid)
        except (OSError, ValueError):
            return False
        if not (difference := plan.difference(self._plan.arguments, self._plan.environment)):
            return True
        logger.info("the warm interpreter is started again: %s", difference)
        os.kill(pid, signal.SIGKILL)
        return False

    def _start(self) -> None:
        for name in (REFUSAL, LEARNED, SOCKET, PID):
            with contextlib.suppress(FileNotFoundError):
                (self._folder / name).unlink()
        # Listening before the interpreter is there to answer, so that the first ranks wait instead of starting cold.
        with socket.socket(socket.AF_UNIX) as listening, (self._folder / _LOG).open("ab") as log:
            listening.bind(str(self._folder / SOCKET))
            listening.listen(_BACKLOG)
            environment = self._plan.starting_environment(self._folder, listening=listening.fileno())
            command = (self._python, *self._plan.arguments)
            pid = self._spawn(Preparation(command, environment, listening.fileno(), log.fileno()))
        (self._folder / PID).write_text(str(pid), encoding="utf-8")

    def _spawn_child(self, start: Preparation) -> int:
        self._child = subprocess.Popen(
            start.command,
            env=start.environment,
            pass_fds=[start.listening],
            stdin=subprocess.DEVNULL,
            stdout=start.log,
            stderr=start.log,
            start_new_session=True,
            preexec_fn=begin_child,  # noqa: PLW1509 - system calls only
        )
        return self._child.pid


def prepare(folder: Path, python: str) -> Path:
    """Writes the programs of warm starts; returns the stand-in."""
    start = folder / START
    start.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: one that was begun early may be reading it, and must never find it empty and continue.
    scratch = start / f"sitecustomize.{os.getpid()}"
    scratch.write_text(_SITECUSTOMIZE, encoding="utf-8")
    scratch.replace(start / "sitecustomize.py")
    stand_in = folder / _STAND_IN
    stand_in.write_bytes(os.fsencode(_STAND_IN_PROGRAM.format(python=python, package=str(_PACKAGE.parent))))
    stand_in.chmod(0o755)
    return stand_in
