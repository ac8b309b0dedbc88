"""Exports events from a thread of its own, so that no destination can slow, block or end the program."""

from __future__ import annotations

import atexit
import contextlib
import logging
import operator
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from enum import Enum
from itertools import repeat
from types import FrameType
from typing import Any

from perdure_training.events.event import Draft, EventType, finish, new_id
from perdure_training.events.exporter import EventsLost, Exporter
from perdure_training.events.redaction import Redaction

logger = logging.getLogger(__name__)

CAPACITY = 16_384
"""Events that wait, at most: several megabytes."""
LINGER = timedelta(milliseconds=250)
"""Time for which events are collected before they are exported together. A process that is killed loses the events of
this time. Each time the thread runs, it finds the processor's caches full of the training's data, and takes the
interpreter's lock from it: at 50 ms that costs two thirds more processor time than at 250 ms."""
_RESTS_AFTER = 1.0
"""Seconds without an event after which the thread waits for the next one, which has to wake it. Until then it looks
every `LINGER`: waking a thread costs the training several times as much as the event itself. A process that emits
nothing is not woken by that."""
CLOSE_WITHIN = timedelta(seconds=2)
"""Time for which the end of the process waits for events that are not exported yet."""
_BATCH = 1_000
"""Events that an exporter gets at once, at most."""
_FATAL = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
TARGET = "events"
"""The target of what the bus reports about itself."""


class Drop(Enum):
    """The events that are dropped when too many wait."""

    NEWEST = "newest"
    """Drop the events that arrive while the queue is full: the beginning of the burst is kept."""
    OLDEST = "oldest"
    """Drop the events that have waited longest: the end of the burst is kept."""


class _Counter:
    """Counts exactly without a lock, which a signal handler could find taken by the code that it interrupted."""

    def __init__(self) -> None:
        self._left = repeat(None, sys.maxsize)

    def add(self) -> None:
        next(self._left)

    @property
    def value(self) -> int:
        return sys.maxsize - operator.length_hint(self._left)


class _Marker:
    """A place in the queue; its lock is released when everything before it is exported."""

    def __init__(self, *, last: bool = False) -> None:
        self.last = last
        self._passed = threading.Lock()
        self._passed.acquire()

    def pass_by(self) -> None:
        self._passed.release()

    def wait(self, timeout: timedelta) -> bool:
        return self._passed.acquire(timeout=max(timeout.total_seconds(), 0.0))


class AsyncExporter:
    """Hands events to another exporter from a background thread.

    Invariants:
        - `put` never waits and never raises, whatever the other exporter does.
        - Every event is exported or counted as lost; the destination gets the counts as an event `lost` of the target
          `events` as soon as it accepts events again.
        - A forked child exports its own events only, through a thread of its own.
    """

    def __init__(
        self,
        exporter: Exporter,
        *,
        capacity: int = CAPACITY,
        drop: Drop = Drop.NEWEST,
        linger: timedelta = LINGER,
        close_within: timedelta = CLOSE_WITHIN,
        flush_on: Iterable[signal.Signals] = (),
        redaction: Redaction | None = None,
    ) -> None:
        """Creates the exporter; its thread starts with the first event.

        Args:
            exporter: The destination.
            capacity: The number of events that may wait.
            drop: The events that are dropped when more would wait.
            linger: Time for which events are collected before they are exported together.
            close_within: Time for which the end of the process, or a signal, waits for waiting events.
            flush_on: Signals that export waiting events before they take effect. None by default: a process with a
                Python handler for SIGTERM does not end while it waits inside of a collective operation.
            redaction: Replaces secrets; None for those of this process's environment.

        Raises:
            ValueError: if the capacity is not positive, or `flush_on` is used outside of the main thread.
        """
        if capacity < 1:
            raise ValueError(f"capacity: expected at least 1, found {capacity}")
        self._exporter = exporter
        self._capacity = capacity
        self._drop = drop
        self._linger = linger.total_seconds()
        self._close_within = close_within
        self._redaction = redaction
        self._begin()
        _exporters.add(self)
        for number in flush_on:
            self._flush_on(number)

    def _begin(self) -> None:
        self._waiting: deque[Draft | _Marker] = deque()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._resting = True
        """Whether an event has to wake the thread, or to start it."""
        self._wakes = threading.Lock()
        self._wakes.acquire()
        self._hurried = False
        self._dropped = _Counter()
        self._refused = 0
        self._reported = (0, 0)
        self._failing = False
        self._closed = False

    @property
    def dropped(self) -> int:
        """Events that were lost because too many waited, or because the exporter was closed."""
        return self._dropped.value

    @property
    def refused(self) -> int:
        """Events that were lost because the destination did not accept them."""
        return self._refused

    def put(self, draft: Draft) -> None:
        """Queues an event; drops one if too many wait. May be called by any thread, and by signal handlers."""
        if self._closed or (len(self._waiting) >= self._capacity and not self._make_room()):
            self._dropped.add()
        else:
            self._waiting.append(draft)
        if self._resting:
            self._wake()

    def _make_room(self) -> bool:
        if self._drop is Drop.NEWEST:
            return False
        with contextlib.suppress(IndexError):
            oldest = self._waiting.popleft()
            if isinstance(oldest, _Marker):
                self._waiting.append(oldest)
            else:
                self._dropped.add()
        return True

    def _wake(self) -> None:
        if self._thread is None:
            if not self._closed:
                self._start()
            return
        # It is awake already, or will look before it rests.
        with contextlib.suppress(RuntimeError):
            self._wakes.release()

    def flush(self, timeout: timedelta = CLOSE_WITHIN) -> bool:
        """Waits until all events that were exported before have reached the destination.

        Args:
            timeout: The longest time to wait.

        Returns:
            Whether they have; False if the destination takes too long.
        """
        return self._pass(_Marker(), timeout)

    def close(self) -> None:
        """Exports what waits, within `close_within`, and ends the thread. Later events are dropped and counted."""
        if self._closed:
            return
        self._closed = True
        if not self._pass(_Marker(last=True), self._close_within):
            logger.warning("events are lost: their destination did not accept them in time")

    def _pass(self, marker: _Marker, timeout: timedelta) -> bool:
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        if not thread.is_alive():
            return False
        self._waiting.append(marker)
        self._hurried = True
        self._wake()
        return marker.wait(timeout)

    def _start(self) -> None:
        # It may be taken by the code that a signal handler interrupts.
        if not self._starting.acquire(blocking=False):
            return
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="perdure-events", daemon=True)
                thread.start()
                self._thread = thread
                atexit.register(self._close_at_exit, weakref.ref(self), os.getpid())
                self._flush_in_multiprocessing()
        except RuntimeError:
            # The interpreter is ending, or there can be no more threads.
            self._closed = True
        finally:
            self._starting.release()

    @staticmethod
    def _close_at_exit(reference: weakref.ref[AsyncExporter], pid: int) -> None:
        exporter = reference()
        if exporter is not None and pid == os.getpid():
            exporter.close()

    def _flush_in_multiprocessing(self) -> None:
        """Closes the exporter at the end of a process of `multiprocessing`, which runs no functions of `atexit`."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self._close_at_exit, args=(weakref.ref(self), os.getpid()), exitpriority=0)

    def _run(self) -> None:
        # Signals go to threads that act on them; SIGPIPE would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FATAL)
        redaction, newest = self._redaction or Redaction(), time.monotonic()
        self._resting = False
        while True:
            if not self._linger or time.monotonic() - newest >= _RESTS_AFTER:
                self._rest()
            if not self._hurried:
                # Collects events, unless a marker hurries it.
                self._wakes.acquire(timeout=self._linger)
            self._hurried = False
            if self._waiting:
                if self._drain(redaction):
                    return
                newest = time.monotonic()

    def _rest(self) -> None:
        self._resting = True
        if not self._waiting:
            self._wakes.acquire()
        self._resting = False

    def _drain(self, redaction: Redaction) -> bool:
        """Exports what waits; returns whether the last marker was among it."""
        while self._waiting:
            marker, batch = None, list[Draft]()
            with contextlib.suppress(IndexError):
                while marker is None and len(batch) < _BATCH:
                    item = self._waiting.popleft()
                    if isinstance(item, _Marker):
                        marker = item
                    else:
                        batch.append(item)
            self._hand_over(batch, redaction)
            if marker is not None:
                self._finish(marker)
                if marker.last:
                    return True
        return False

    def _hand_over(self, batch: list[Draft], redaction: Redaction) -> None:
        accepted = not batch or self._export(batch, redaction)
        counts = self._dropped.value, self._refused
        if accepted and counts != self._reported and self._export([self._lost(counts)], redaction, counted=False):
            self._reported = counts

    def _export(self, batch: list[Draft], redaction: Redaction, *, counted: bool = True) -> bool:
        """Has the destination export events; returns whether it exported all of them."""
        try:
            self._exporter.export([redaction.event(finish(draft)) for draft in batch])
        except BaseException as error:
            if counted:
                self._refused += min(error.count, len(batch)) if isinstance(error, EventsLost) else len(batch)
            if not self._failing:
                logger.warning("events are being lost: %s: %s", type(error).__name__, error)
            self._failing = True
            return False
        if self._failing:
            logger.warning("events are exported again; %d were lost", self._refused)
        self._failing = False
        return True

    def _lost(self, counts: tuple[int, int]) -> Draft:
        dropped, refused = (now - before for now, before in zip(counts, self._reported, strict=True))
        attributes: dict[str, Any] = {"dropped": dropped, "refused": refused, "total": sum(counts)}
        return new_id(), time.time(), TARGET, "lost", EventType.INSTANT, attributes, None, None

    def _finish(self, marker: _Marker) -> None:
        with contextlib.suppress(Exception):
            self._exporter.flush()
            if marker.last:
                self._exporter.close()
        marker.pass_by()

    def _flush_on(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if before is None:
            # It is not Python's, and could not be called.
            return

        def flush(_number: int, frame: FrameType | None) -> None:
            self.flush(self._close_within)
            if callable(before):
                before(number, frame)
            elif before is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        signal.signal(number, flush)

    def _after_fork(self) -> None:
        self._begin()
        with contextlib.suppress(Exception):
            self._exporter.after_fork()


_exporters: weakref.WeakSet[AsyncExporter] = weakref.WeakSet()


def _after_fork() -> None:
    for exporter in list(_exporters):
        exporter._after_fork()  # pyrefly: ignore[protected-access]


os.register_at_fork(after_in_child=_after_fork)
