"""Forks ranks from this process, which imports in advance the modules that ranks reported.

A forked process tries the imports first: packages whose import fails there, or does not survive a fork, are left out
without any effect on this process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping

from ..system.processes import die_with_parent
from .fork_safety import end_children
from .imports import Imports, Refused
from .learning import Learned
from .loop import Loop
from .messages import Request, log, write_record
from .names import LEARNED
from .traces import Traces

_MOST_TRIALS = 5
"""Each failed trial names a package to leave out. More trials would not be worth their CPU time."""
_LARGEST_RESULT = 1 << 20

Tried = Callable[[Mapping[str, str], Mapping[str, str]], None]
"""Receives the packages that only forks cannot carry over, and those that cannot be imported in advance at all, with
the reasons."""


class CannotFork(Exception):
    """The rank must be started cold; the message says why."""


class Forks:
    """Forks this process. It has one thread and has touched no device, so a fork is equivalent to a new process."""

    def __init__(
        self, *, folder: str, imports: Imports, traces: Traces, loop: Loop, release: Callable[[], None], unfit: str = ""
    ) -> None:
        """Creates the object.

        Args:
            folder: The folder for the report of the imports.
            imports: The imports of this process.
            traces: The side effects of those imports.
            loop: The event loop of this process.
            release: Called in each fork: closes the files of this process and of its other ranks.
            unfit: Why this process cannot be forked at all; empty if it can.
        """
        self._folder = folder
        self._imports = imports
        self._traces = traces
        self._loop = loop
        self._release = release
        self._unfit = unfit
        self._trials = 0
        self._trial_result: int | None = None
        """The descriptor from which the trial in progress is read."""
        self._left_out: dict[str, str] = {}
        """Packages that cannot be imported in advance, and why."""
        self._lost: set[str] = set()
        """The ones among them that a fork does not carry over; other starts can import them."""

    def fork(self, request: Request) -> int:
        """Forks the requested rank.

        Returns:
            The rank's PID; 0 in the fork, which has closed all files that are not its own.

        Raises:
            CannotFork: if the fork would differ from the rank, or the system cannot create another process.
        """
        problem = self._unfit or self._imports.plan.difference(
            request.arguments, request.environment, read=self._imports.read_of_place
        )
        if problem:
            raise CannotFork(problem)
        try:
            return self._fork()
        except OSError as error:
            raise CannotFork(f"fork: {error.strerror}") from error

    def learn(self, learned: Learned, then: Tried) -> None:
        """Imports the modules that ranks reported, once. Until that is done, ranks are forked without them.

        Args:
            learned: The report of a rank.
            then: Called when the imports are done.
        """
        if not self._trials:
            self._try(learned, then)

    def find_contradiction(self, learned: Learned) -> str:
        """Returns why ranks with this report cannot be started from imports made in advance; empty if they can."""
        reason = self._imports.find_contradiction(learned.changed)
        if reason:
            self.write_record(reason)
        return reason

    def write_record(self, failure: str = "") -> None:
        """Writes what was imported, and the failure if there was one, to a file for other processes."""
        content = {"modules": len(sys.modules), "left_out": self._left_out, "failure": failure}
        log(f"imports of ranks: {content}")
        write_record(f"{self._folder}/{LEARNED}", content)

    def _fork(self) -> int:
        pid = os.fork()
        if pid == 0:
            if self._trial_result is not None:
                os.close(self._trial_result)
            self._release()
        return pid

    def _try(self, learned: Learned, then: Tried) -> None:
        """Tries the imports in a forked process."""
        self._trials += 1
        reading, writing = os.pipe()
        try:
            pid = self._fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            self.write_record(f"fork: {error.strerror}")
            return
        if pid == 0:
            code = 1
            try:
                die_with_parent()
                os.close(reading)
                os.write(writing, json.dumps(self._trial(learned)).encode())
                end_children()
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        self._trial_result = reading
        self._loop.watch(reading, lambda: self._end_trial(pid, reading, learned, then))

    def _trial(self, learned: Learned, attend: Callable[[], None] | None = None) -> dict[str, object]:
        """Imports the modules; describes the package that cannot be imported in advance. Empty if all can."""
        try:
            with self._traces.record():
                self._imports.import_learned(learned, without=self._left_out, attend=attend)
        except Refused as refused:
            return {"package": refused.package, "reason": str(refused), "by_forks_only": refused.by_forks_only}
        return {}

    def _end_trial(self, pid: int, reading: int, learned: Learned, then: Tried) -> None:
        content = os.read(reading, _LARGEST_RESULT)
        self._loop.forget(reading)
        os.close(reading)
        self._trial_result = None
        os.waitpid(pid, 0)
        if not content:
            self.write_record("the process that tried the imports died")
            return
        if refused := json.loads(content):
            self._left_out[refused["package"]] = refused["reason"]
            if refused["by_forks_only"]:
                self._lost.add(refused["package"])
            if self._trials < _MOST_TRIALS:
                self._try(learned, then)
                return
            self.write_record("too many packages cannot be imported in advance")
        else:
            self._import(learned)
        lost = {package: reason for package, reason in self._left_out.items() if package in self._lost}
        then(lost, {package: reason for package, reason in self._left_out.items() if package not in lost})

    def _import(self, learned: Learned) -> None:
        if refused := self._trial(learned, attend=lambda: self._loop.attend(0)):
            self._unfit = f"its imports had another result than in the trial: {refused['reason']}"
        self.write_record(self._unfit)
