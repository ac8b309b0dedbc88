"""Keeps a standby per rank: started while ranks train, never while they are started again, and used once.

They are children of the warm interpreter and in its process group, so they end with it, and with the torchrun or the
launcher that keeps it, as ranks do. One is started at a time: each import takes a core that ranks may want.
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

from ..system.cgroups import MemoryController
from ..system.processes import available_bytes, resident_bytes
from .learning import Learned
from .loop import Loop
from .messages import Request, leave_word, log, receive, send
from .names import STANDBY_VARIABLE, STANDBYS
from .plan import Plan
from .start_method import STANDBY

_SETTLING = timedelta(seconds=60)
"""After ranks were started, where none of them tells of its first step."""
_NO_ROOM_YET = timedelta(seconds=60)
_ORDER_TIMEOUT = timedelta(seconds=5)
_MOST_REFUSALS = 8
_MOST_DEATHS = 3
"""Of standbys that were never used. What dies again and again (the node's memory, say) is not started again forever."""
_ROOM = 3
"""How many times the interpreter's own memory must be free: a standby takes about one, and ranks may still grow."""


@dataclass(kw_only=True, eq=False)
class _Standby:
    pid: int
    local_rank: str
    plan: Plan
    """What it stands for, with its rank's place."""
    control: socket.socket
    ended: int
    """Its pidfd."""
    read: frozenset[str] | None = None
    """Variables of its place that its imports have read; None while it imports."""
    discarded: bool = False


@dataclass(kw_only=True)
class Standbys:
    """All of a node. There are none before they are `wanted`."""

    plan: Plan
    folder: str
    loop: Loop
    _places: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """By local rank: the variables of its place, as it was started last."""
    _alive: list[_Standby] = field(default_factory=list[_Standby])
    _learned: Learned | None = None
    _reason: str = ""
    _failure: str = ""
    """Why none is started any more."""
    _left_out: dict[str, str] = field(default_factory=dict[str, str])
    _deaths: int = 0
    _due: float = 0.0
    """When the next one may be started, on the monotonic clock."""

    def want(self, learned: Learned, *, reason: str, without: Mapping[str, str] | None = None) -> None:
        """Has standbys kept from now on.

        Args:
            learned: What they are to import.
            reason: Why ranks are not just forked.
            without: Packages that no process may import ahead, and why.
        """
        self._learned, self._reason = learned, reason
        self._left_out.update(without or {})
        self._due = time.monotonic()
        self._leave_word()

    @property
    def wanted(self) -> bool:
        return self._learned is not None

    def replenish(self, learned: Learned) -> None:
        """The ranks have made their first steps: what recovery has taken may be started again."""
        if self._learned is not None and learned.changed.keys() - self._learned.changed.keys():
            # What they have imported may be what such a script prepares in its own way.
            self._discard_all()
        self.want(learned, reason=self._reason)

    def give_up(self, reason: str) -> None:
        """Ends them all, for good."""
        self._fail(reason)
        self._discard_all()

    def hand_over(self, request: Request) -> int | None:
        """Makes a standby the rank that is asked for.

        Returns:
            Its process, which is the caller's now; None where there is none that would be the same as a started one.
        """
        self._due = time.monotonic() + _SETTLING.total_seconds()
        self._places[request.local_rank] = {
            name: value for name, value in request.environment.items() if name in STANDBY.places
        }
        found: _Standby | None = None
        for standby in self._alive:
            if standby.read is None:
                # Its imports would take a core from ranks that are starting.
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
        self._leave_word()
        return found.pid

    @property
    def due_in(self) -> float | None:
        """Seconds until `advance` has something to do; None where only an event can tell."""
        return None if self._next() is None else max(0.0, self._due - time.monotonic())

    def advance(self) -> None:
        """Starts the next one, where it is time."""
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
        """In a fork: closes what it shall not have."""
        for standby in self._alive:
            standby.control.close()
            os.close(standby.ended)

    def _next(self) -> str | None:
        """The local rank whose standby is to be started next; none while another one imports."""
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
        # Only this class waits for it: Popen's own bookkeeping must not warn.
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
        self.loop.watch(ours.fileno(), lambda: self._hear(standby))
        ours.settimeout(_ORDER_TIMEOUT.total_seconds())
        order = {"place": place, "learned": learned.as_json(), "without": list(self._left_out), "reason": self._reason}
        try:
            send(ours, order)
        except OSError:
            self._discard(standby)

    def _hear(self, standby: _Standby) -> None:
        """What its imports have come to."""
        try:
            said, _ = receive(standby.control)
        except (OSError, ValueError):
            said = {}
        if not said:
            # It has ended, or is no good.
            self.loop.forget(standby.control.fileno())
            standby.control.close()
        elif refused := said.get("refused"):
            standby.discarded = True
            self._left_out[refused["package"]] = refused["reason"]
            if len(self._left_out) > _MOST_REFUSALS:
                self._fail("too much cannot be imported ahead")
        elif failure := said.get("failure"):
            standby.discarded = True
            self._fail(failure)
        else:
            standby.read = frozenset(said["read"])
        self._leave_word()

    def _end(self, standby: _Standby) -> None:
        _, status = os.waitpid(standby.pid, 0)
        self._forget(standby)
        if standby.discarded:
            return
        self._deaths += 1
        code = os.waitstatus_to_exitcode(status)
        log(f"the standby of local rank {standby.local_rank} ended with {code}")
        if self._deaths >= _MOST_DEATHS:
            self._fail(f"{_MOST_DEATHS} standbys ended before they were used, the last one with {code}")
        self._leave_word()

    def _discard(self, standby: _Standby) -> None:
        """Ends it; its end is noticed later."""
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

    def _leave_word(self) -> None:
        """Says for others which there are, and why."""
        waiting = [standby for standby in self._alive if standby.read is not None and not standby.discarded]
        ready = {standby.local_rank: standby.pid for standby in waiting}
        content = {"reason": self._reason, "ready": ready, "left_out": self._left_out, "failure": self._failure}
        leave_word(f"{self.folder}/{STANDBYS}", content)


def _no_room() -> str:
    """Why the node's memory does not allow for another standby; empty where it does."""
    wanted = _ROOM * resident_bytes(os.getpid())[0]
    free = [size for size in (available_bytes(), MemoryController().free_bytes) if size is not None]
    if free and min(free) < wanted:
        return f"{min(free) >> 20} MiB of memory are free, {wanted >> 20} wanted"
    return ""
