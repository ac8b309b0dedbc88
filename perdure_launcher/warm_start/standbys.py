"""Keeps a standby per rank. It is started while ranks train, never while they are restarted, and is used once.

Standbys are children of the warm interpreter and in its process group, so they end with it, and with the torchrun or
launcher that supervises it, as ranks do. Only one is started at a time: its imports use a core that ranks may need.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..system.cgroups import MemoryController
from ..system.processes import available_bytes, resident_bytes
from .learning import Learned
from .loop import Loop
from .messages import Request, log, receive, send, write_record
from .names import STANDBY_VARIABLE, STANDBYS
from .plan import Plan
from .start_method import STANDBY

_SETTLING = timedelta(seconds=60)
"""Time after a start of ranks until standbys are started, if no rank reports its first step."""
_NO_ROOM_YET = timedelta(seconds=60)
_ORDER_TIMEOUT = timedelta(seconds=5)
_MOST_REFUSALS = 8
_MOST_DEATHS = 3
"""Maximum number of consecutive standbys that die before use. It ends a loop of deaths, from lack of memory, say."""
_ROOM = 3
"""Factor of the interpreter's own memory that must be free: a standby takes about one, and ranks may still grow."""


@dataclass(kw_only=True, eq=False)
class _Standby:
    pid: int
    local_rank: str
    plan: Plan
    """Its plan, with its rank's variables."""
    control: socket.socket
    ended: int
    """Its pidfd."""
    read: frozenset[str] | None = None
    """Rank variables that its imports have read; None while it imports."""
    discarded: bool = False


@dataclass(kw_only=True)
class Standbys:
    """All standbys of a node. There are none until `keep` is called."""

    plan: Plan
    folder: str
    loop: Loop
    _places: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """The rank variables of each local rank's last start."""
    _alive: list[_Standby] = field(default_factory=list[_Standby])
    _learned: Learned | None = None
    _reason: str = ""
    _failure: str = ""
    """Why no more standbys are started."""
    _left_out: dict[str, str] = field(default_factory=dict[str, str])
    _deaths: int = 0
    _due: float = 0.0
    """The monotonic time at which the next standby may be started."""

    def keep(self, learned: Learned, *, reason: str, without: Mapping[str, str] | None = None) -> None:
        """Keeps standbys from now on.

        Args:
            learned: The modules that they import.
            reason: Why forks do not suffice.
            without: Packages that no process may import in advance, and why.
        """
        self._learned, self._reason = learned, reason
        self._left_out.update(without or {})
        self._due = time.monotonic()
        self._write_record()

    @property
    def needed(self) -> bool:
        return self._learned is not None

    def replenish(self, learned: Learned) -> None:
        """Replaces used standbys, after the ranks have made their first steps."""
        if self._learned is not None and learned.changed.keys() - self._learned.changed.keys():
            # Their imports may include those for which such a script sets variables.
            self._discard_all()
        self.keep(learned, reason=self._reason)

    def give_up(self, reason: str) -> None:
        """Ends all standbys and starts no more."""
        self._fail(reason)
        self._discard_all()

    def hand_over(self, request: Request) -> int | None:
        """Turns a standby into the requested rank.

        Returns:
            The rank's PID, which the caller now has to wait for; None if no standby is equivalent to a started rank.
        """
        self._due = time.monotonic() + _SETTLING.total_seconds()
        self._places[request.local_rank] = {
            name: value for name, value in request.environment.items() if name in STANDBY.places
        }
        found: _Standby | None = None
        for standby in self._alive:
            if standby.read is None:
                # Its imports would take CPU time from ranks that are starting.
                self._discard(standby)
            elif standby.local_rank == request.local_rank and not standby.discarded:
                found = standby
        if found is None:
            return None
        if difference := found.plan.difference(request.arguments, request.environment, read=found.read or ()):
            log(f"the standby of local rank {found.local_rank} does not fit: {difference}")
            self._discard(found)
            return None
        try:
            request.pass_on(found.control)
        except OSError:
            self._discard(found)
            return None
        self._forget(found)
        self._deaths = 0
        self._write_record()
        return found.pid

    @property
    def due_in(self) -> float | None:
        """Seconds until `advance` has something to do; None if it only waits for events."""
        return None if self._next() is None else max(0.0, self._due - time.monotonic())

    def advance(self) -> None:
        """Starts the next standby if it is due."""
        local_rank = self._next()
        if local_rank is None or self._learned is None or time.monotonic() < self._due:
            return
        if problem := _no_room():
            log(f"no standby: {problem}")
            self._due = time.monotonic() + _NO_ROOM_YET.total_seconds()
            return
        try:
            self._start(local_rank, self._learned)
        except OSError as error:
            self._fail(f"a standby cannot be started: {error}")

    def release(self) -> None:
        """Closes the standbys' files, in a forked process."""
        for standby in self._alive:
            standby.control.close()
            os.close(standby.ended)

    def _next(self) -> str | None:
        """Returns the local rank whose standby is started next; None while another standby imports."""
        if self._learned is None or self._failure or any(standby.read is None for standby in self._alive):
            return None
        present = {standby.local_rank for standby in self._alive if not standby.discarded}
        return min(self._places.keys() - present, key=lambda name: (len(name), name), default=None)

    def _start(self, local_rank: str, learned: Learned) -> None:
        place = self._places[local_rank]
        ours, its = socket.socketpair()
        with its:
            environment = self.plan.starting_environment(Path(self.folder), listening=its.fileno())
            process = subprocess.Popen(
                [sys.orig_argv[0], *self.plan.arguments],
                env={**environment, STANDBY_VARIABLE: local_rank},
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )
        # This class waits for the process itself; without a return code Popen would warn.
        process.returncode = 0
        standby = _Standby(
            pid=process.pid,
            local_rank=local_rank,
            plan=Plan(self.plan.arguments, {**self.plan.environment, **place}),
            control=ours,
            ended=os.pidfd_open(process.pid),
        )
        self._alive.append(standby)
        self.loop.watch(standby.ended, lambda: self._end(standby))
        self.loop.watch(ours.fileno(), lambda: self._read_message(standby))
        ours.settimeout(_ORDER_TIMEOUT.total_seconds())
        order = {"place": place, "learned": learned.as_json(), "without": list(self._left_out), "reason": self._reason}
        try:
            send(ours, order)
        except OSError:
            self._discard(standby)

    def _read_message(self, standby: _Standby) -> None:
        """Handles the standby's report of its imports."""
        said: dict[str, Any]
        try:
            said, _ = receive(standby.control)
        except (OSError, ValueError):
            said = {}
        if not said:
            # The standby has ended, or its report is invalid.
            self.loop.forget(standby.control.fileno())
            standby.control.close()
        elif refused := said.get("refused"):
            standby.discarded = True
            self._left_out[refused["package"]] = refused["reason"]
            if len(self._left_out) > _MOST_REFUSALS:
                self._fail("too many packages cannot be imported in advance")
        elif failure := said.get("failure"):
            standby.discarded = True
            self._fail(failure)
        else:
            standby.read = frozenset(said["read"])
        self._write_record()

    def _end(self, standby: _Standby) -> None:
        _, status = os.waitpid(standby.pid, 0)
        if standby.read is None and not standby.discarded and standby.control.fileno() >= 0:
            # On a busy machine its end is seen together with what it has said before, which is read first.
            self._read_message(standby)
        self._forget(standby)
        if standby.discarded:
            return
        self._deaths += 1
        code = os.waitstatus_to_exitcode(status)
        log(f"the standby of local rank {standby.local_rank} ended with {code}")
        if self._deaths >= _MOST_DEATHS:
            self._fail(f"{_MOST_DEATHS} standbys ended before they were used, the last one with {code}")
        self._write_record()

    def _discard(self, standby: _Standby) -> None:
        """Kills a standby; its end is handled later."""
        standby.discarded = True
        os.kill(standby.pid, signal.SIGKILL)

    def _discard_all(self) -> None:
        for standby in self._alive:
            self._discard(standby)

    def _forget(self, standby: _Standby) -> None:
        self._alive.remove(standby)
        self.loop.forget(standby.ended)
        os.close(standby.ended)
        if standby.control.fileno() >= 0:
            self.loop.forget(standby.control.fileno())
            standby.control.close()

    def _fail(self, reason: str) -> None:
        self._failure = reason
        log(f"no more standbys: {reason}")

    def _write_record(self) -> None:
        """Writes the available standbys, and why they exist, to a file for other processes."""
        waiting = [standby for standby in self._alive if standby.read is not None and not standby.discarded]
        ready = {standby.local_rank: standby.pid for standby in waiting}
        content = {"reason": self._reason, "ready": ready, "left_out": self._left_out, "failure": self._failure}
        write_record(f"{self.folder}/{STANDBYS}", content)


def _no_room() -> str:
    """Returns why the node's memory does not allow another standby; empty if it does."""
    needed = _ROOM * resident_bytes(os.getpid())[0]
    free = [size for size in (available_bytes(), MemoryController().free_bytes) if size is not None]
    if free and min(free) < needed:
        return f"{min(free) >> 20} MiB of memory are free, {needed >> 20} needed"
    return ""
