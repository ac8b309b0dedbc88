"""Forks a rank per request, passes signals to it and its end back, all in one thread.

Once a rank has told what else it imports (`learning`), the server imports that too, for the ranks after it. A forked
process tries first: what it finds unfit for a fork, or fails in, is nobody's loss, and is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from ..processes import die_with_parent
from .context import difference, process_context
from .imports import Imports, Refused, end_children
from .learning import Learned
from .names import COLD, ENDED, LEARNED, WARM
from .plan import Plan
from .traces import Traces

_REQUEST_TIMEOUT_S = 2.0
_LARGEST_PIECE = 1 << 20
_FAILED = 1
_MOST_TRIALS = 5
"""Each one that fails names a package to leave out; what needs more is not worth its processor time."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A rank that a stand-in wants forked."""

    connection: socket.socket
    arguments: tuple[str, ...]
    environment: dict[str, str]
    context: dict[str, str]
    files: tuple[int, ...]
    """Standard input, output and error."""

    def close(self) -> None:
        self.connection.close()
        for file in self.files:
            os.close(file)


@dataclass(kw_only=True)
class _Rank:
    pid: int
    connection: socket.socket
    abandoned: bool = False
    """Its stand-in is gone: it was killed."""


class Server:
    """Serves until the process is killed, and returns in forked ranks only."""

    def __init__(self, plan: Plan, folder: str, listening: socket.socket, imports: Imports, traces: Traces) -> None:
        """Creates the server.

        Args:
            plan: What it forks.
            folder: Where it leaves word of what it has learned.
            listening: Its socket.
            imports: What this process has imported.
            traces: What that has left behind.
        """
        self._plan = plan
        self._folder = folder
        self._context = process_context()
        self._imports = imports
        self._traces = traces
        self._listening = listening
        self._ranks: dict[int, _Rank] = {}
        """By pidfd."""
        self._requests: list[Request] = []
        self._unfit = ""
        """Why nothing can be forked any more."""
        self._trials = 0
        self._trial_result: int | None = None
        """The descriptor on which a trial will tell its result."""
        self._left_out: dict[str, str] = {}
        """Packages that cannot be imported ahead, and why."""
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._watch(listening.fileno(), self._accept)

    def serve(self) -> Request:
        """Returns in forked ranks, with the request that led to each."""
        while True:
            self._attend(None)
            # A rank that was killed may still hold its device and its ports: the next must not meet it.
            while self._requests and not any(rank.abandoned for rank in self._ranks.values()):
                request = self._requests.pop(0)
                if self._fork(request):
                    return request

    def _attend(self, timeout: float | None) -> None:
        """Handles what has happened, and waits for something to happen at most so many milliseconds."""
        for descriptor, _ in self._poll.poll(timeout):
            if handler := self._handlers.get(descriptor):
                handler()

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        try:
            connection.settimeout(_REQUEST_TIMEOUT_S)
            message = _read_message(connection)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            _log(f"a message could not be read: {error!r}")
            connection.close()
            return
        if message is None:
            answer(connection, WARM)
            connection.close()
        elif isinstance(message, Learned):
            connection.close()
            self._learn(message)
        elif reason := self._unfit or self._mismatch(message):
            answer(connection, f"{COLD} {reason}")
            message.close()
        else:
            self._requests.append(message)

    def _mismatch(self, request: Request) -> str:
        """Why a rank that this request asks for would differ from a fork of ours; empty where it would not."""
        if found := self._plan.difference(request.arguments, request.environment, read=self._imports.read_of_devices):
            return found
        if names := difference(self._context, request.context):
            return f"it was started with another {names}"
        return ""

    def _fork(self, request: Request) -> bool:
        """Whether this is the forked rank."""
        if _has_closed(request.connection):
            request.close()
            return False
        try:
            pid = os.fork()
        except OSError as error:
            answer(request.connection, f"{COLD} fork: {error.strerror}")
            request.close()
            return False
        if pid == 0:
            self._let_go()
            return True
        for file in request.files:
            os.close(file)
        rank = _Rank(pid=pid, connection=request.connection)
        ended = os.pidfd_open(pid)
        self._ranks[ended] = rank
        self._watch(ended, lambda: self._end(rank, ended))
        self._watch(rank.connection.fileno(), lambda: self._pass_on(rank))
        return False

    def _let_go(self) -> None:
        """In a forked process: what belongs to the server, and to its ranks."""
        self._listening.close()
        for ended, rank in self._ranks.items():
            os.close(ended)
            rank.connection.close()
        for request in self._requests:
            request.close()
        if self._trial_result is not None:
            os.close(self._trial_result)

    def _pass_on(self, rank: _Rank) -> None:
        """Signals for the rank, from its stand-in; one that is gone has been killed, and so is the rank."""
        try:
            received = rank.connection.recv(4096)
        except OSError:
            received = b""
        if received:
            for number in received.split():
                _signal(rank.pid, int(number))
            return
        self._forget(rank.connection.fileno())
        rank.connection.close()
        rank.abandoned = True
        _signal(rank.pid, signal.SIGKILL)

    def _end(self, rank: _Rank, ended: int) -> None:
        _, status = os.waitpid(rank.pid, 0)
        self._forget(ended)
        os.close(ended)
        del self._ranks[ended]
        if not rank.abandoned:
            self._forget(rank.connection.fileno())
            answer(rank.connection, f"{ENDED} {os.waitstatus_to_exitcode(status)}")
            rank.connection.close()

    def _learn(self, learned: Learned) -> None:
        """Imports what ranks have imported, once; they start as they did until that is done."""
        if reason := self._imports.contradicted_by(learned.changed):
            self._unfit = reason
            self._note(reason)
        elif not self._trials:
            self._try(learned)

    def _try(self, learned: Learned) -> None:
        """Has a forked process try the imports."""
        self._trials += 1
        reading, writing = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            self._note(f"fork: {error.strerror}")
            return
        if pid == 0:
            code = 1
            try:
                die_with_parent()
                self._let_go()
                os.close(reading)
                os.write(writing, json.dumps(self._trial(learned)).encode())
                end_children()
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        self._trial_result = reading
        self._watch(reading, lambda: self._end_trial(pid, reading, learned))

    def _trial(self, learned: Learned, attend: Callable[[], None] | None = None) -> dict[str, str]:
        """Names the package that cannot be imported ahead, and why; nothing where all can."""
        try:
            with self._traces.kept():
                self._imports.learned(learned, without=self._left_out, attend=attend)
        except Refused as refused:
            return {"package": refused.package, "reason": str(refused)}
        return {}

    def _end_trial(self, pid: int, reading: int, learned: Learned) -> None:
        content = os.read(reading, _LARGEST_PIECE)
        self._forget(reading)
        os.close(reading)
        self._trial_result = None
        os.waitpid(pid, 0)
        if not content:
            self._note("the process that tried to import more died")
        elif not (refused := json.loads(content)):
            self._import(learned)
        else:
            self._left_out[refused["package"]] = refused["reason"]
            if self._trials < _MOST_TRIALS:
                self._try(learned)
            else:
                self._note("too much cannot be imported ahead")

    def _import(self, learned: Learned) -> None:
        if refused := self._trial(learned, attend=lambda: self._attend(0)):
            self._unfit = f"its imports had another result than when they were tried: {refused['reason']}"
        self._note(self._unfit)

    def _note(self, failure: str) -> None:
        """Leaves word of the outcome; best effort."""
        content = {"modules": len(sys.modules), "left_out": self._left_out, "failure": failure}
        _log(f"imports of ranks: {content}")
        with contextlib.suppress(OSError):
            scratch = f"{self._folder}/{LEARNED}.new"
            with open(scratch, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(scratch, f"{self._folder}/{LEARNED}")

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> None:
        del self._handlers[descriptor]
        self._poll.unregister(descriptor)


def _read_message(connection: socket.socket) -> Request | Learned | None:
    """What was sent; None for somebody who only waits for the answer."""
    text, files, _, _ = socket.recv_fds(connection, _LARGEST_PIECE, 3)
    while text and not text.endswith(b"\n"):
        piece = connection.recv(_LARGEST_PIECE)
        if not piece:
            break
        text += piece
    try:
        fields = cast("dict[str, Any]", json.loads(text))
        if not fields:
            return None
        if learned := fields.get("learned"):
            return Learned.from_json(learned)
        return Request(
            connection=connection,
            arguments=tuple(fields["arguments"]),
            environment=fields["environment"],
            context=fields["context"],
            files=(files[0], files[1], files[2]),
        )
    except (ValueError, KeyError, TypeError, IndexError):
        for file in files:
            os.close(file)
        raise


def answer(connection: socket.socket, line: str) -> None:
    """Sends the stand-in a line; one that is gone needs none."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{line}\n".encode())


def _has_closed(connection: socket.socket) -> bool:
    """Whether nobody waits for the answer any more."""
    gone = select.poll()
    gone.register(connection.fileno(), select.POLLRDHUP)
    return bool(gone.poll(0))


def _log(text: str) -> None:
    """Not by `logging`, which is the script's to set up."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _signal(pid: int, number: int) -> None:
    """To the rank and its process group, as torchrun signals its own children."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # It has not made its group yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
