"""Starts a rank per request, passes signals to it and its end back, all in one thread.

Where a rank comes from is not its matter: `standbys` has one that waits, or `forks` makes one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from .context import difference, process_context
from .forks import CannotFork, Forks
from .imports import Imports
from .learning import Learned
from .loop import Loop
from .messages import Request, answer, has_closed, log, read_message
from .names import COLD, ENDED, WARM
from .plan import Plan
from .standbys import Standbys
from .start_method import has_devices, why_standbys
from .traces import Traces

_REQUEST_TIMEOUT_S = 2.0


@dataclass(kw_only=True)
class _Rank:
    pid: int
    connection: socket.socket
    abandoned: bool = False
    """Its stand-in is gone: it was killed."""


class Server:
    """Serves until the process is killed, and returns in forked ranks only."""

    def __init__(
        self,
        plan: Plan,
        folder: str,
        listening: socket.socket,
        imports: Imports,
        traces: Traces,
        unfit_for_forks: str = "",
    ) -> None:
        """Creates the server.

        Args:
            plan: What ranks it starts.
            folder: Where it records what it has learned.
            listening: Its socket.
            imports: What this process has imported.
            traces: What that has left behind.
            unfit_for_forks: Why this process cannot be forked; empty where it can.
        """
        self._plan = plan
        self._context = process_context()
        self._listening = listening
        self._ranks: dict[int, _Rank] = {}
        """By pidfd."""
        self._requests: list[Request] = []
        self._unfit = ""
        """Why no rank is started from here any more."""
        self._loop = Loop()
        self._forks = Forks(
            folder=folder,
            imports=imports,
            traces=traces,
            loop=self._loop,
            release=self._release,
            unfit=unfit_for_forks,
        )
        self._standbys = Standbys(plan=plan, folder=folder, loop=self._loop)
        self._devices = has_devices(plan.environment)
        if unfit_for_forks:
            self._standbys.want(Learned((), {}), reason=unfit_for_forks)
        self._loop.watch(listening.fileno(), self._accept)

    def serve(self) -> Request:
        """Returns in forked ranks, with the request that led to each."""
        while True:
            self._loop.attend(None if self._requests else self._standbys.due_in)
            # A rank that was killed may still hold its device and its ports: the next must not meet it.
            while self._requests and not any(rank.abandoned for rank in self._ranks.values()):
                request = self._requests.pop(0)
                if self._start(request):
                    return request
            if not self._requests:
                self._standbys.advance()

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        try:
            connection.settimeout(_REQUEST_TIMEOUT_S)
            message = read_message(connection)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            log(f"a message could not be read: {error!r}")
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
        """Why a rank that this request asks for would differ from one of ours; empty where it would not."""
        if found := self._plan.difference(request.arguments, request.environment):
            return found
        if names := difference(self._context, request.context):
            return f"it was started with another {names}"
        return ""

    def _start(self, request: Request) -> bool:
        """Whether this is the rank that was asked for, forked."""
        if has_closed(request.connection):
            request.close()
            return False
        try:
            pid = self._standbys.hand_over(request)
            if pid is None:
                pid = self._forks.fork(request)
        except CannotFork as reason:
            answer(request.connection, f"{COLD} {reason}")
            request.close()
            return False
        if pid == 0:
            return True
        for file in request.files:
            os.close(file)
        rank = _Rank(pid=pid, connection=request.connection)
        ended = os.pidfd_open(pid)
        self._ranks[ended] = rank
        self._loop.watch(ended, lambda: self._end(rank, ended))
        self._loop.watch(rank.connection.fileno(), lambda: self._pass_on(rank))
        return False

    def _release(self) -> None:
        """In a forked process: what belongs to the server, and to its ranks."""
        self._listening.close()
        self._standbys.release()
        for ended, rank in self._ranks.items():
            os.close(ended)
            rank.connection.close()
        for request in self._requests:
            request.close()

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
        self._loop.forget(rank.connection.fileno())
        rank.connection.close()
        rank.abandoned = True
        _signal(rank.pid, signal.SIGKILL)

    def _end(self, rank: _Rank, ended: int) -> None:
        _, status = os.waitpid(rank.pid, 0)
        self._loop.forget(ended)
        os.close(ended)
        del self._ranks[ended]
        if not rank.abandoned:
            self._loop.forget(rank.connection.fileno())
            answer(rank.connection, f"{ENDED} {os.waitstatus_to_exitcode(status)}")
            rank.connection.close()

    def _learn(self, learned: Learned) -> None:
        """A rank has made its first step: what it has imported is imported for the ranks after it."""
        if reason := self._forks.contradicted_by(learned):
            self._unfit = reason
            self._standbys.give_up(reason)
        elif self._standbys.wanted:
            self._standbys.replenish(learned)
        elif self._devices:
            self._forks.leave_word()
            self._keep_standbys(learned, {}, {})
        else:
            self._forks.learn(learned, lambda lost, others: self._keep_standbys(learned, lost, others))

    def _keep_standbys(self, learned: Learned, lost_by_forks: Mapping[str, str], left_out: Mapping[str, str]) -> None:
        if reason := why_standbys(devices=self._devices, lost_by_forks=lost_by_forks):
            self._standbys.want(learned, reason=reason, without=left_out)


def _signal(pid: int, number: int) -> None:
    """To the rank and its process group, as torchrun signals its own children."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # It has not made its group yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
