"""Keeps one warm interpreter beside whoever starts ranks: torchrun's rendezvous handler, or the launcher itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from ..processes import begin_child, environment_of, read_process
from .names import EXECUTABLE_VARIABLE, FOLDER_VARIABLE, PYTHON_VARIABLE, REFUSAL, SOCKET
from .plan import START, Plan

logger = logging.getLogger(__name__)

_STAND_IN = "python"
_LOG = "log"
_PID = "pid"
_BACKLOG = 128
_MOST_STARTS = 3
"""A warm interpreter that dies again and again (the node's memory, say) is not started for ever."""

_LONGEST_INTERPRETER = 120
"""Older kernels cut a script's first line off after 127 bytes."""
_PACKAGE = Path(__file__).parent.parent

_STAND_IN_PROGRAM = """\
#!{python} -IS
import sys

sys.path.insert(0, {package!r})

from perdure_launcher.warm.stand_in import main

main()
"""

# Python itself would go on to the script where this raised, which then ran outside any world.
_SITECUSTOMIZE = """\
try:
    from perdure_launcher.warm.interpreter import wait_to_be_forked

    wait_to_be_forked()
except BaseException:
    import os
    import traceback

    traceback.print_exc()
    os._exit(1)
"""


def offer(folder: Path, environment: MutableMapping[str, str]) -> str:
    """Has ranks started through the stand-in, from now on, by a torchrun with this environment.

    Returns:
        Why that is not possible; empty where it is.
    """
    if EXECUTABLE_VARIABLE in environment:
        return f"{EXECUTABLE_VARIABLE} is set in the job's environment"
    if len(os.fsencode(sys.executable)) > _LONGEST_INTERPRETER or any(map(str.isspace, sys.executable)):
        return f"{sys.executable} cannot stand in a script's first line"
    try:
        stand_in = prepare(folder, sys.executable)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    if not os.access(stand_in, os.X_OK):
        return f"{stand_in} cannot be executed on this node"
    environment[EXECUTABLE_VARIABLE] = str(stand_in)
    environment[PYTHON_VARIABLE] = sys.executable
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


@contextlib.contextmanager
def starting(folder: Path, plan: Plan, python: str) -> Generator[Preparation]:
    """Prepares the folder for a warm interpreter that the caller starts within; its process ID is kept by `started`.

    Raises:
        OSError: if the folder cannot be written.
    """
    for name in (REFUSAL, SOCKET, _PID):
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
    # Listening before anybody is there to answer, so that the first ranks wait instead of starting cold.
    with socket.socket(socket.AF_UNIX) as listening, (folder / _LOG).open("ab") as log:
        listening.bind(str(folder / SOCKET))
        listening.listen(_BACKLOG)
        environment = plan.starting_environment(folder, listening=listening.fileno())
        yield Preparation((python, *plan.arguments), environment, listening.fileno(), log.fileno())


def started(folder: Path, pid: int) -> None:
    """Keeps the process ID, for a keeper that may adopt the process."""
    (folder / _PID).write_text(str(pid), encoding="utf-8")


def begin_early(folder: Path, spawn: Callable[[Preparation], int], plan: Plan, python: str) -> None:
    """Starts a warm interpreter on a guess, for a keeper that comes later and may adopt it.

    Never raises: ranks start anyway.
    """
    try:
        prepare(folder, python)
        with starting(folder, plan, python) as start:
            started(folder, spawn(start))
    except Exception as error:
        logger.warning("no warm interpreter is started ahead: %s", error)


class WarmKeeper:
    """Starts the warm interpreter, and again where it has died; ends it.

    To be used by one thread, which must outlive the ranks: the kernel ends the interpreter, and with it its ranks, when
    the thread that started it ends.
    """

    def __init__(self, *, folder: Path, python: str, plan: Plan) -> None:
        """Creates the keeper.

        Args:
            folder: As it was given to `offer`.
            python: The interpreter that ranks are to run in.
            plan: What it stands for.
        """
        self._folder = folder
        self._python = python
        self._plan = plan
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def ensure(self) -> None:
        """Starts the warm interpreter where none runs; returns before it is warm. Never raises: ranks start anyway."""
        if self._process is not None:
            if self._process.poll() is None:
                return
        elif self._is_begun():
            return
        if self._starts >= _MOST_STARTS or (self._starts and (self._folder / REFUSAL).exists()):
            return
        self._starts += 1
        try:
            with starting(self._folder, self._plan, self._python) as start:
                self._process = subprocess.Popen(
                    start.command,
                    env=start.environment,
                    pass_fds=[start.listening],
                    stdin=subprocess.DEVNULL,
                    stdout=start.log,
                    stderr=start.log,
                    start_new_session=True,
                    preexec_fn=begin_child,  # noqa: PLW1509 - system calls only
                )
        except OSError as error:
            logger.warning("ranks start cold: the warm interpreter cannot be started: %s", error)

    def close(self) -> None:
        """Ends the warm interpreter that this keeper has started, and whatever ranks of it are left."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _is_begun(self) -> bool:
        """Whether somebody has begun one, early, that stands for the same; one that does not is ended."""
        try:
            pid = int((self._folder / _PID).read_text(encoding="utf-8"))
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


def prepare(folder: Path, python: str) -> Path:
    """Writes the programs of warm starts; returns the stand-in."""
    start = folder / START
    start.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: one that was begun early may be reading it, and must never find it empty and go on.
    scratch = start / f"sitecustomize.{os.getpid()}"
    scratch.write_text(_SITECUSTOMIZE, encoding="utf-8")
    scratch.replace(start / "sitecustomize.py")
    stand_in = folder / _STAND_IN
    stand_in.write_text(_STAND_IN_PROGRAM.format(python=python, package=str(_PACKAGE.parent)), encoding="utf-8")
    stand_in.chmod(0o755)
    return stand_in
