"""Serves requests for ranks: starts each, forwards signals to it and its exit status back, all in one thread.

A rank is either a waiting standby (`standbys`) or a fork (`forks`).
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..system.cleaners import kill_group
from ..system.program_signals import signal_program
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
    """Whether its shim is gone, that is, was killed."""


class Server:
    """Serves requests until the process is killed, and returns in forked ranks only."""

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
            plan: The plan of the ranks that it starts.
            folder: The folder for its reports.
            listening: Its socket.
            imports: The imports of this process.
            traces: The side effects of those imports.
            unfit_for_forks: Why this process cannot be forked; empty if it can.
        """
        self._plan = plan
        self._context = process_context()
        self._listening = listening
        self._ranks: dict[int, _Rank] = {}
        """Ranks by pidfd."""
        self._requests: list[Request] = []
        self._unfit = ""
        """Why this process starts no more ranks."""
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
            self._standbys.keep(Learned((), {}), reason=unfit_for_forks)
        self._loop.watch(listening.fileno(), self._accept)

    def serve(self) -> Request:
        """Serves requests. Returns in forked ranks, with the request that led to each."""
        while True:
            self._loop.attend(None if self._requests else self._standbys.due_in)
            # A killed rank may still hold its device and its ports until it has ended.
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
        """Returns why the requested rank would differ from ranks of this interpreter; empty if it would not."""
        if found := self._plan.difference(request.arguments, request.environment):
            return found
        if names := difference(self._context, request.context):
            return f"its {names} differ from the warm interpreter's"
        return ""

    def _start(self, request: Request) -> bool:
        """Starts the requested rank; returns True in the rank, if it is a fork."""
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
        """Closes the files of the server and of its other ranks, in a forked process."""
        self._listening.close()
        self._standbys.release()
        for ended, rank in self._ranks.items():
            os.close(ended)
            rank.connection.close()
        for request in self._requests:
            request.close()

    def _pass_on(self, rank: _Rank) -> None:
        """Forwards signals from the shim to the rank. If the shim was killed, kills the rank."""
        try:
            received = rank.connection.recv(4096)
        except OSError:
            received = b""
        if received:
            for number in received.split():
                signal_program(rank.pid, signal.Signals(int(number)))
            return
        self._loop.forget(rank.connection.fileno())
        rank.connection.close()
        rank.abandoned = True
        kill_group(rank.pid)

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
        """Handles the report that a rank sends at its first step: prepares its imports for later ranks."""
        if reason := self._forks.find_contradiction(learned):
            self._unfit = reason
            self._standbys.give_up(reason)
        elif self._standbys.needed:
            self._standbys.replenish(learned)
        elif self._devices:
            self._forks.write_record()
            self._keep_standbys(learned, {}, {})
        else:
            self._forks.learn(learned, lambda lost, others: self._keep_standbys(learned, lost, others))

    def _keep_standbys(self, learned: Learned, lost_by_forks: Mapping[str, str], left_out: Mapping[str, str]) -> None:
        if reason := why_standbys(devices=self._devices, lost_by_forks=lost_by_forks):
            self._standbys.keep(learned, reason=reason, without=left_out)
