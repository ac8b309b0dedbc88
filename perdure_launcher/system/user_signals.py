"""Passes on signals that mean what a script makes of them: schedulers send them before a time limit, say.

Slurm sends them to all processes of a step, Perdure's own among them; people and other schedulers to one process, which
passes them on. None of Perdure's processes ends by one, and a rank gets each once: a process that a user started, such
as `perdure join`, sends the launcher another signal (`REQUESTS`). A launcher that got the signal itself, too, knows
that ranks had it already.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from . import processes
from .program_signals import SHELLS

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGTSTP, signal.SIGXCPU)

REQUESTS = {number: signal.SIGRTMIN + 6 + index for index, number in enumerate(USER_SIGNALS)}
"""By signal, the one that asks a launcher to pass it on to its ranks. Neither glibc, Python nor systemd uses them."""

_NUMBERS = {request: number for number, request in REQUESTS.items()}

TOGETHER = 0.3
"""Seconds within which a launcher gets a signal that was sent to all processes of a step, and the request for it."""


class Passing:
    """Decides which signals a launcher passes on, and when."""

    def __init__(self, pass_on: Callable[[signal.Signals], object]) -> None:
        """Creates the object.

        Args:
            pass_on: Sends a signal to the ranks.
        """
        self._pass_on = pass_on
        self._received: dict[signal.Signals, set[bool]] = {}
        """By signal, whether it was requested, received, or both."""
        self._due: dict[signal.Signals, float] = {}

    @property
    def next_step(self) -> float | None:
        """The monotonic time at which `advance` has something to do."""
        return min(self._due.values(), default=None)

    def take(self, number: int, *, now: float) -> bool:
        """Takes in a signal that the launcher received; returns whether it is one of these or a request for one."""
        meant = signal.Signals(_NUMBERS.get(number, number))
        if meant not in REQUESTS:
            return False
        self._received.setdefault(meant, set()).add(number in _NUMBERS)
        self._due.setdefault(meant, now + TOGETHER)
        return True

    def advance(self, *, now: float) -> None:
        """Passes on what is due: what was sent to one process only."""
        for number in [number for number, due in self._due.items() if due <= now]:
            del self._due[number]
            if len(self._received.pop(number)) == 1:
                self._pass_on(number)


def survive_user_signals() -> None:
    """Keeps this process from ending by the signals; the programs that it starts have their defaults again.

    Not by ignoring them, which programs would inherit.
    """
    for number in USER_SIGNALS:
        if number is not signal.SIGTSTP and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: None)


def send_to_handlers(number: signal.Signals, *, looked_through: Iterable[int], represented: Path) -> list[int]:
    """Signals the programs below this process that handle the signal; for any other one it would be the end.

    From above downwards: a program that handles the signal is responsible for its children, so they do not receive it.
    A shell is not.

    Args:
        number: The signal.
        looked_through: Processes of Perdure's and torchrun's, which handle it by doing nothing.
        represented: The folder of the programs that only represent a rank.

    Returns:
        The processes that were signaled.
    """
    children: dict[int, list[int]] = {}
    for process in processes.descendants():
        if not process.zombie:
            children.setdefault(process.parent, []).append(process.pid)
    through, found = frozenset(looked_through), list[int]()
    pending = list(children.get(os.getpid(), ()))
    for pid in pending:
        handles = pid not in through and _catches(pid, number)
        if handles and not _is_below(represented, processes.command_of(pid)):
            found.append(pid)
        if not handles or _is_shell(pid):
            pending += children.get(pid, ())
    processes.send(found, number)
    return found


def _is_below(folder: Path, command: Iterable[str]) -> bool:
    return any(word.startswith(f"{folder}{os.sep}") for word in list(command)[:3])


def _is_shell(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in {*SHELLS, "busybox"}
    except OSError:
        return False


def _catches(pid: int, number: signal.Signals) -> bool:
    for line in processes.read_file(pid, "status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
