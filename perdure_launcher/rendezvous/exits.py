"""Collects from torchrun's log why ranks ended, and limits how long torchrun waits for ranks that it terminates.

torchrun passes the reason of a worker's death to no plugin, but logs it, so a filter reads the log; it changes no
record. torchrun also waits 30 s for each rank that handles SIGTERM, although the ranks of an ended generation have
nothing left to save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from ..agent_link.rank_exits import rank_exit
from ..protocol import RankExit
from ..torch_internals import (
    MULTIPROCESSING_LOGGER,
    logged_failures,
    logged_termination,
    torchrun_is_terminated,
)
from ..warm_start.starts import read_start


class ExitWatch(logging.Filter):
    """Collects ranks' exits from torchrun's log."""

    def __init__(
        self, *, stop_grace: timedelta, warm_folder: Path, on_exits: Callable[[Sequence[RankExit]], None]
    ) -> None:
        """Creates the watch; `install` starts it.

        Args:
            stop_grace: The time from torchrun's SIGTERM to SIGKILL if torchrun terminates ranks to restart them.
            warm_folder: Holds the process IDs of ranks that were started through the shim, which is torchrun's child.
            on_exits: Called in torchrun's main thread with the exits collected so far.
        """
        super().__init__()
        self._stop_grace = stop_grace
        self._warm_folder = warm_folder
        self._on_exits = on_exits
        self._exits: list[RankExit] = []
        self._terminated: set[int] = set()
        self.base_rank = 0
        """The global rank of the node's first process in the current generation."""

    def install(self) -> None:
        logging.getLogger(MULTIPROCESSING_LOGGER).addFilter(self)

    def take(self) -> list[RankExit]:
        """Returns the exits collected since the last call."""
        exits, self._exits = self._exits, []
        self._terminated.clear()
        return exits

    def filter(self, record: logging.LogRecord) -> bool:
        """Reads the record, and lets it pass."""
        # torchrun must continue with any record, including those of releases that are not known here.
        with contextlib.suppress(Exception):
            if exits := logged_failures(record, terminated=self._terminated, exit_of=self._exit_of):
                self._exits += exits
                self._on_exits(tuple(self._exits))
            elif (pid := logged_termination(record)) is not None:
                self._limit_termination(pid)
        return True

    def _exit_of(self, local_rank: int, pid: int, code: int, error_file: str | None) -> RankExit:
        start = read_start(self._warm_folder, local_rank)
        return rank_exit(
            local_rank=local_rank,
            global_rank=self.base_rank + local_rank,
            pid=start.pid if start else pid,
            code=code,
            error_file=error_file,
        )

    def _limit_termination(self, pid: int) -> None:
        """Kills the rank's process group after the grace, unless torchrun itself is terminated (the job's grace)."""
        self._terminated.add(pid)
        if torchrun_is_terminated():
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
