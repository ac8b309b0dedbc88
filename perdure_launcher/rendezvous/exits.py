"""Collects the exits of ranks from torchrun, and shortens torchrun's wait for ranks that it ends.

torchrun does not tell plugins why a worker died, but it logs the reason. So this module installs a log filter, which
reads each record and does not change the log. torchrun also waits 30 s for every rank that handles SIGTERM, although
the ranks of a dead generation have nothing left to save.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from ..agent_link.rank_exits import rank_exit
from ..protocol import RankExit
from ..warm_start.starts import read_start

_MULTIPROCESSING_LOGGER = "torch.distributed.elastic.multiprocessing.api"
_FAILED = "failed (exitcode"
_CLOSING = ("Sending process", "Closing process")
_DEEPEST_FRAME = 16


class ExitWatch(logging.Filter):
    """Collects exits of ranks from torchrun's log."""

    def __init__(
        self, *, stop_grace: timedelta, warm_folder: Path, on_exits: Callable[[Sequence[RankExit]], None]
    ) -> None:
        """Creates the watch; `install` adds it to torchrun's logger.

        Args:
            stop_grace: Time from torchrun's SIGTERM to our SIGKILL when it ends ranks in order to restart them.
            warm_folder: The folder that records a rank's actual PID if a shim was torchrun's child.
            on_exits: Called in torchrun's main thread with the exits collected so far.
        """
        super().__init__()
        self._stop_grace = stop_grace
        self._warm_folder = warm_folder
        self._on_exits = on_exits
        self._exits: list[RankExit] = []
        self._closed: set[int] = set()
        self.base_rank = 0
        """Global rank of the node's first process in the current generation."""

    def install(self) -> None:
        logging.getLogger(_MULTIPROCESSING_LOGGER).addFilter(self)

    def take(self) -> list[RankExit]:
        """Returns the exits that were collected since the last call."""
        exits, self._exits = self._exits, []
        self._closed.clear()
        return exits

    def filter(self, record: logging.LogRecord) -> bool:
        """Reads a record; accepts every record."""
        # torchrun must continue even if a future release has another log format.
        with contextlib.suppress(Exception):
            message, arguments = str(record.msg), record.args if isinstance(record.args, tuple) else ()
            if message.startswith(_FAILED):
                self._exits += self._failures(arguments)
                self._on_exits(tuple(self._exits))
            elif message.startswith(_CLOSING) and arguments:
                self._hurry(int(str(arguments[0])))
        return True

    def _failures(self, arguments: Sequence[Any]) -> list[RankExit]:
        """Returns all ranks that failed by themselves, from the logging object; else the one that the record names."""
        context = _logging_context(inspect.currentframe())
        failures: Mapping[int, Any] = getattr(context, "_failures", None) or {}
        exits = [
            self._exit(int(failure.local_rank), int(failure.pid), int(failure.exitcode), failure.error_file)
            for failure in failures.values()
            if not (int(failure.pid) in self._closed and failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL))
        ]
        if exits:
            return exits
        code, local_rank, pid = int(arguments[0]), int(arguments[1]), int(arguments[2])
        error_files: Mapping[int, str] = getattr(context, "error_files", None) or {}
        return [self._exit(local_rank, pid, code, error_files.get(local_rank))]

    def _exit(self, local_rank: int, pid: int, code: int, error_file: str | None) -> RankExit:
        start = read_start(self._warm_folder, local_rank)
        return rank_exit(
            local_rank=local_rank,
            global_rank=self.base_rank + local_rank,
            pid=start.pid if start else pid,
            code=code,
            error_file=error_file,
        )

    def _hurry(self, pid: int) -> None:
        """Kills the rank's process group after the grace period, unless torchrun itself is being ended (with the job's
        own grace period)."""
        self._closed.add(pid)
        if type(sys.exc_info()[1]).__name__ == "SignalException":
            return
        descriptor = os.pidfd_open(pid)
        threading.Thread(target=self._kill_late, args=(pid, descriptor), name="stop-grace", daemon=True).start()

    def _kill_late(self, pid: int, descriptor: int) -> None:
        try:
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            if not ended.poll(self._stop_grace.total_seconds() * 1000):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _logging_context(frame: FrameType | None) -> object | None:
    """Returns torchrun's object with its workers, found among the callers of the log."""
    for _ in range(_DEEPEST_FRAME):
        if frame is None:
            return None
        if frame.f_code.co_name == "_poll":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
