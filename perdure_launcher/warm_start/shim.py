"""The shim: the executable that torchrun starts instead of Python. It requests a warm rank and represents it.

It lives as long as the rank, forwards signals to it, and ends with its exit status. If there is no warm interpreter, it
executes the Python that torchrun would have started. It runs once per rank and start, so it imports little.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from types import FrameType

from .context import process_context
from .names import COLD, ENDED, FOLDER_VARIABLE, OURS, PYTHON_VARIABLE, REFUSAL, SOCKET, STARTED, record_start

_PATIENCE_S = 30.0
"""Seconds to wait for an answer: the warm interpreter may still be importing, which takes as long as it would here."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_TO_THE_RANK = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that Slurm, or the launcher, sends to the rank itself, too."""
_LOST = 71


class NotWarm(Exception):
    """The rank must be started cold; the message says why."""


def main() -> None:
    """Runs the shim. Does not return."""
    arguments, environment = sys.argv[1:], dict(os.environ)
    folder, python = environment[FOLDER_VARIABLE], environment[PYTHON_VARIABLE]
    for name in OURS:
        environment.pop(name, None)
    forwarding = _SignalForwarding()
    try:
        connection = _ask(folder, arguments, environment, forwarding)
    except NotWarm as reason:
        forwarding.stop()
        record_start(folder, warm=False, reason=str(reason))
        os.execvpe(python, [python, *arguments], environment)
    _follow_rank(connection)


class _SignalForwarding:
    """Forwards signals to the rank, from before it exists: the rank may start before the shim reads the answer."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}
        self._forwarded: list[signal.Signals] = []

    def begin(self, connection: socket.socket) -> None:
        """Starts forwarding. Call it after the whole request was sent, with signals blocked since before that."""

        def forward(number: int, _: FrameType | None) -> None:
            self._forwarded.append(signal.Signals(number))
            with contextlib.suppress(OSError):
                connection.sendall(f"{number}\n".encode())

        for number in _FORWARDED:
            self._before[number] = signal.signal(number, forward)
        for number in _TO_THE_RANK:
            self._before[number] = signal.signal(number, lambda number, _: None)

    def stop(self) -> None:
        """Stops forwarding, because this process becomes the rank itself. Applies the signals that arrived
        meanwhile."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for number in self._forwarded:
            if self._before[number] != signal.SIG_IGN:
                _die_of(number)


def _ask(
    folder: str, arguments: list[str], environment: dict[str, str], forwarding: _SignalForwarding
) -> socket.socket:
    """Requests the rank, and begins to forward signals to it.

    Raises:
        NotWarm: if the rank was not started warm and never will be.
    """
    if len(os.listdir("/proc/self/fd")) > 4:
        # Expected: standard input, output and error, and the folder that is being listed.
        raise NotWarm("files beyond standard input, output and error were passed on to it")
    request = {"arguments": arguments, "environment": environment, "context": process_context()}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_PATIENCE_S)
    message = json.dumps(request).encode() + b"\n"
    try:
        with _signals_blocked():
            connection.connect(f"{folder}/{SOCKET}")
            sent = socket.send_fds(connection, [message], [0, 1, 2])
            if sent < len(message):
                connection.sendall(message[sent:])
            forwarding.begin(connection)
        word, _, detail = _line(connection).partition(" ")
    except TimeoutError:
        raise NotWarm(f"the warm interpreter did not answer within {_PATIENCE_S:.0f} s") from None
    except OSError as error:
        raise NotWarm(_refusal(folder) or f"there is no warm interpreter ({error.strerror})") from None
    if word == STARTED:
        return connection
    if word == ENDED:
        raise NotWarm("the process for the rank ended before it became the rank")
    raise NotWarm(detail if word == COLD else _refusal(folder) or "the warm interpreter has ended")


@contextlib.contextmanager
def _signals_blocked() -> Generator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow_rank(connection: socket.socket) -> None:
    connection.settimeout(None)
    try:
        word, _, status = _line(connection).partition(" ")
    except OSError:
        word, status = "", ""
    if word != ENDED:
        # The warm interpreter has ended, and its ranks with it.
        _die_of(signal.SIGKILL)
    code = int(status)
    if code < 0:
        _die_of(-code)
    os._exit(code)


def _die_of(number: int) -> None:
    """Ends with the signal that ended the rank, so that torchrun reads the same status. Writes no core: the rank's, if
    any, counts."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(_LOST)


def _line(connection: socket.socket) -> str:
    """Reads one line, or the part of it that was received when the other side closed."""
    received = b""
    while not received.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            break
        received += piece
    return received.decode().rstrip("\n")


def _refusal(folder: str) -> str:
    try:
        with open(f"{folder}/{REFUSAL}", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
