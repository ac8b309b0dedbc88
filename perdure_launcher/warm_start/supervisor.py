"""Supervises the warm interpreter on behalf of the process that starts ranks: torchrun's rendezvous handler, or the
launcher itself."""

from __future__ import annotations

import contextlib
import json
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

from ..system.files import write_file
from ..system.processes import begin_child, environment_of, read_process
from .learning import state_of_folder
from .names import (
    ALL_COLD,
    EXECUTABLE_VARIABLE,
    FOLDER_VARIABLE,
    LEARNED,
    PACKAGES,
    PID,
    PYTHON_VARIABLE,
    REFUSAL,
    SOCKET,
    WARM,
)
from .plan import START, Plan

logger = logging.getLogger(__name__)

PREPARATION = timedelta(seconds=30)
"""The time that a node may prepare before it joins an elastic job; the other nodes continue to train meanwhile."""

_SHIM = "python"
_INTERPRETER = "interpreter"
"""A link to an interpreter whose path a script's first line cannot hold."""
_LOG = "log"

_BACKLOG = 128
SETTLING = timedelta(seconds=60)
"""The time after a start of ranks that show no first step until their imports are assumed to be over."""

_MOST_STARTS = 3
"""Maximum number of starts: a warm interpreter that dies repeatedly, from lack of memory, say, is not restarted."""

_LONGEST_INTERPRETER = 120
"""Maximum length of the interpreter's path: older kernels truncate a script's first line after 127 bytes."""
_PACKAGE = Path(__file__).parent.parent

_SHIM_PROGRAM = """\
#!{python} -IS
import sys

sys.path.insert(0, {package!r})

from perdure_launcher.warm_start.shim import main

main()
"""

# If this raised, Python itself would continue with the script, outside of any world.
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
    """Makes a torchrun with this environment, or another process that starts its `PYTHON_EXEC`, start ranks through the
    shim.

    Returns:
        Why that is not possible; empty if it is.
    """
    if EXECUTABLE_VARIABLE in environment:
        return f"{EXECUTABLE_VARIABLE} is set in the job's environment"
    if not any(map(_fits_first_line, (python, str(folder / _INTERPRETER)))):
        return f"neither {python} nor a link to it in {folder} fits a script's first line: too long, or with spaces"
    try:
        shim = prepare(folder, python)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    if not os.access(shim, os.X_OK):
        return f"{shim} cannot be executed on this node"
    (folder / ALL_COLD).unlink(missing_ok=True)
    environment[EXECUTABLE_VARIABLE] = str(shim)
    environment[PYTHON_VARIABLE] = python
    environment[FOLDER_VARIABLE] = str(folder)
    return ""


@dataclass(frozen=True)
class Preparation:
    """The parameters to start a warm interpreter with."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    listening: int
    """The descriptor that the interpreter inherits."""
    log: int
    """The descriptor for its output."""


class InterpreterSupervisor:
    """Starts the warm interpreter, and restarts it after it has died.

    Supervisors follow each other in one folder: the launcher starts the interpreter that torchrun's handler later takes
    over. A supervisor that finds an interpreter with the same plan leaves it running.
    """

    def __init__(
        self, *, folder: Path, python: str, plan: Plan, spawn: Callable[[Preparation], int] | None = None
    ) -> None:
        """Creates the supervisor.

        Args:
            folder: The folder that `offer` was called with.
            python: The interpreter that ranks run in.
            plan: The plan of the ranks.
            spawn: Starts a process and returns its ID, for a caller that supervises the process. By default the process
                is a child of the calling thread, which must outlive the ranks: the kernel kills the interpreter, and
                with it its ranks, when that thread ends.
        """
        self._folder = folder
        self._python = python
        self._plan = plan
        self._spawn = spawn or self._spawn_child
        self._child: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._due: float | None = None
        """The monotonic time at which a dead interpreter is restarted at the latest."""

    def ensure(self) -> None:
        """Starts the warm interpreter if none runs. Returns before it is warm, and never raises: ranks can start
        cold."""
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
        """Prepares for a restart of ranks; call it before that.

        If the interpreter has died, they start cold at once. The imports of a new one would take longer than a start of
        the ranks, and would compete with them for CPU time: `follow_ranks` starts it after the ranks have started.

        Returns:
            Whether `follow_ranks` has something to do.
        """
        if self._child is not None:
            self._child.poll()
        if not self._stands():
            self._due = time.monotonic() + SETTLING.total_seconds()
        return self._due is not None

    def follow_ranks(self, stepped: Callable[[], bool]) -> None:
        """Restarts a dead interpreter after the ranks have made their first steps."""
        if self._due is not None and (time.monotonic() >= self._due or stepped()):
            self._due = None
            self.ensure()

    def wait_until_warm(self, patience: timedelta) -> bool:
        """Waits until ranks can be started warm; returns False if they cannot be, or not in time."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(patience.total_seconds())
                connection.connect(str(self._folder / SOCKET))
                connection.sendall(b"{}\n")
                return bool(connection.recv(len(WARM)))
        except OSError:
            return False

    def close(self) -> None:
        """Ends the warm interpreter if it is this supervisor's child, and with it its remaining ranks."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGKILL)
            self._child.wait()

    def _stands(self) -> bool:
        """Returns whether an interpreter with the same plan runs. Kills one with another plan, or with packages of
        which others have been installed since."""
        try:
            pid = int((self._folder / PID).read_text(encoding="utf-8"))
            process = read_process(pid)
            if process is None or process.zombie or environment_of(pid).get(FOLDER_VARIABLE) != str(self._folder):
                return False
            plan = Plan.of_process(pid)
        except (OSError, ValueError):
            return False
        difference = plan.difference(self._plan.arguments, self._plan.environment) or self._changed_packages()
        if not difference:
            return True
        logger.info("the warm interpreter is started again: %s", difference)
        os.kill(pid, signal.SIGKILL)
        return False

    def _changed_packages(self) -> str:
        """Returns where packages were installed since the interpreter imported some; empty if nowhere."""
        try:
            known: dict[str, int] = json.loads((self._folder / PACKAGES).read_text(encoding="utf-8"))
            changed = [root for root, state in known.items() if state_of_folder(root) != state]
        except (OSError, ValueError, AttributeError):
            # Not written yet, or a folder that is gone.
            return ""
        return f"packages were installed in {changed[0]}" if changed else ""

    def _start(self) -> None:
        for name in (REFUSAL, LEARNED, SOCKET, PID, PACKAGES):
            with contextlib.suppress(FileNotFoundError):
                (self._folder / name).unlink()
        # The socket listens before the interpreter runs, so that the first ranks wait instead of starting cold.
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
    """Writes the programs of warm starts; returns the shim's path."""
    start = folder / START
    start.mkdir(parents=True, exist_ok=True)
    # Atomic: an interpreter that is just starting must never read an empty file and continue with the script.
    write_file(start / "sitecustomize.py", _SITECUSTOMIZE)
    shim, first = folder / _SHIM, python
    if not _fits_first_line(python):
        # Replaced, never missing: shims may be starting. The launcher and torchrun's handler may do so at once.
        link, new = folder / _INTERPRETER, folder / f"{_INTERPRETER}.{os.getpid()}"
        new.unlink(missing_ok=True)
        new.symlink_to(os.path.realpath(python))
        first = str(new.replace(link))
    shim.write_bytes(os.fsencode(_SHIM_PROGRAM.format(python=first, package=str(_PACKAGE.parent))))
    shim.chmod(0o755)
    return shim


def _fits_first_line(interpreter: str) -> bool:
    return len(os.fsencode(interpreter)) <= _LONGEST_INTERPRETER and not any(map(str.isspace, interpreter))
