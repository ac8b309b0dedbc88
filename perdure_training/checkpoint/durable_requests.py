"""The steps of a rank that are to be stored, and wait.

A script may request steps faster than the storage takes them. Each kept snapshot keeps memory from being used, so the
newest request replaces an older one, unless that is the one that the rank has offered to the others: it must still have
that when they choose it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from perdure_training.checkpoint.store_round import Superseded
from perdure_training.node_api.storage_link import StorageProblem
from perdure_training.snapshots.arena import Header, SnapshotPin

_LOOK = 0.5
"""Seconds."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that is to be stored."""

    header: Header
    content: memoryview
    pin: SnapshotPin
    crc32: int | None
    """Of the content, for the agent; None if it is not known yet."""


@dataclass(frozen=True)
class Request:
    """A step that is to be stored."""

    step: int
    snapshot: Snapshot | None
    problem: str = ""
    """Why there is no snapshot of it."""
    newer: int | None = None
    """The step that this rank is to store in its place."""

    def taken(self) -> Snapshot:
        """Returns the snapshot.

        Raises:
            Superseded: if this rank has given it up for a newer one.
            StorageProblem: if there is none.
        """
        if self.newer is not None:
            raise Superseded(f"step {self.newer} was requested since")
        if self.snapshot is None:
            raise StorageProblem(self.problem)
        return self.snapshot

    def end(self) -> None:
        """Gives the snapshot free."""
        if self.snapshot is not None:
            self.snapshot.pin.release()


class DurableRequests:
    """The requests of one rank. One thread adds them and waits for them, another one stores them.

    Invariants:
        - The newest request waits until it is taken.
        - At most two snapshots are kept: the newest, and the one that is offered or being stored.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, Request] = {}
        self._offered: int | None = None
        self._taken: Request | None = None
        self._requested = -1
        self._outcome = (-1, "")
        self._ended = ""
        self._closed = False

    @property
    def requested(self) -> int:
        """The newest step that was requested; -1 if none was."""
        return self._requested

    @property
    def is_busy(self) -> bool:
        """Whether a step of this rank waits, or is being stored."""
        return bool(self._waiting) or self._taken is not None

    def expect(self, step: int) -> None:
        """Records that a step is to be stored, before it is known whether this rank can save it."""
        with self._changed:
            self._requested = max(self._requested, step)

    def add(self, request: Request) -> None:
        """Adds the newest request."""
        with self._changed:
            self._requested = max(self._requested, request.step)
            if self._ended:
                request.end()
                return
            for step in [step for step in self._waiting if step != self._offered]:
                self._waiting.pop(step).end()
            self._waiting[request.step] = request
            self._changed.notify_all()

    def offer(self) -> int | None:
        """Waits for a request, and returns the step of the newest one, which stays until it is taken; None once there
        will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._offered = max(self._waiting, default=None)
            return self._offered

    def take(self, step: int, *, within: float, has_passed: Callable[[int], bool] = lambda _: False) -> Request:
        """Returns the request for a step, which is being stored until `finish`. Waits for it where this rank is behind
        the one that has offered the step, and not where it `has_passed` it."""
        until = time.monotonic() + within
        with self._changed:
            while not any(waiting >= step for waiting in self._waiting) and not has_passed(step):
                if (left := until - time.monotonic()) <= 0:
                    break
                # Nothing announces that the rank has passed it.
                self._changed.wait(min(left, _LOOK))
            request = self._waiting.pop(step, None)
            self._give_up_to(step)
            if request is None:
                newer = max(self._waiting, default=None)
                problem = f"this rank has not saved it with durable=True within {within:.0f} s"
                if has_passed(step):
                    problem = "this rank had passed it when it learned that it was to be stored"
                request = Request(step, None, problem, newer)
            self._taken = request
            return request

    def finish(self, step: int) -> None:
        """Gives free what was taken, and gives up all requests up to this step: all ranks have given them up."""
        with self._changed:
            self._give_up_to(step)
            if self._taken is not None:
                self._taken.end()
            self._taken = self._offered = None
            self._changed.notify_all()

    def _give_up_to(self, step: int) -> None:
        for older in [waiting for waiting in self._waiting if waiting <= step]:
            self._waiting.pop(older).end()

    def conclude(self, step: int, problem: str) -> None:
        """Records what became of a step: empty if all ranks have stored it."""
        with self._changed:
            self._outcome = max(self._outcome, (step, problem), key=lambda outcome: outcome[0])
            self._changed.notify_all()

    def end(self, problem: str) -> None:
        """Gives up everything, also what is requested later."""
        with self._changed:
            self._ended = problem
            for request in self._waiting.values():
                request.end()
            self._waiting = {}
            self._changed.notify_all()

    def close(self) -> None:
        """Records that no request follows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_until_taken(self, timeout: float) -> bool:
        """Waits until no snapshot of this rank is kept; returns whether that is so within `timeout`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_busy, timeout)

    def wait_for_outcome(self, step: int, timeout: float) -> str | None:
        """Waits until it is known what became of a step or of a later one; returns why it was not stored, empty if it
        was, and None if that is not known within `timeout`."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome[0] >= step or self._ended, timeout)
            if self._outcome[0] >= step:
                return self._outcome[1]
            return self._ended or None
