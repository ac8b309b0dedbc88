"""Exits of ranks: why each one ended, from its status, its error file or torchrun's log, until the agent knows.

torchrun passes the reason of a worker's death to no plugin, but logs it, so a filter reads the log; it changes no
record. torchrun also waits 30 s for each rank that handles SIGTERM, although the ranks of an ended generation have
nothing left to save.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from perdure_training.node_api.bodies import RankExit
from perdure_training.node_api.codec import Malformed, decode
from perdure_training.node_api.text import well_formed

from .rank_plugins.error_file import STATUS, WRITER
from .system.cleaners import kill_group
from .system.files import write_file
from .system.program_signals import continue_child, signal_child
from .torch_internals import (
    MULTIPROCESSING_LOGGER,
    finished_before,
    logged_failures,
    logged_termination,
    torchrun_is_terminated,
    unlogged_failures,
)
from .warm_start.starts import read_start

LONGEST_TRACEBACK = 2000
LONGEST_ERROR = 500
_SHOWN_RANKS = 3
_LARGEST_EXIT_CODE = 255
_AFTER_CHILD_S = 60.0
"""Seconds within which a wrapper ends after the program that it wraps."""
SUPERSEDED_EXIT_CODE = 87
"""The exit code with which torchrun leaves the exit barrier of a generation that is over."""


def rank_exit(
    *, local_rank: int, global_rank: int, pid: int, code: int, error_file: str | os.PathLike[str] | None
) -> RankExit:
    """Returns the exit of a rank that has just ended.

    Args:
        local_rank: The rank's number on the node.
        global_rank: The rank's number in the world.
        pid: The rank's PID.
        code: The exit code; negative for signals.
        error_file: The rank's error file, if there is one.
    """
    exit_code, signal_number = split_status(code)
    ended = with_error(
        RankExit(local_rank=local_rank, global_rank=global_rank, pid=pid, exit_code=exit_code, signal=signal_number),
        error_file,
    )
    return ended if ended.time else replace(ended, time=time.time())


def split_status(code: int) -> tuple[int | None, int | None]:
    """Splits a return code, negative for signals (as `Popen.returncode`), into exit code and signal, of which one is
    None."""
    return (None, -code) if code < 0 else (code, None)


def describe_status(exit_code: int | None, signal_number: int | None) -> str:
    """Returns the status as a short text for users."""
    if signal_number is None:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(signal_number).name
    except ValueError:
        return f"signal {signal_number}"


def with_error(ended: RankExit, error_file: str | os.PathLike[str] | None) -> RankExit:
    """Adds the error that `torch.distributed.elastic` or our excepthook wrote to the error file, if there is one.

    The formats are torch's: `{"message": "…"}` and `{"message": {"message": "…", "extraInfo": {…}}}`.
    """
    if not error_file:
        return ended
    try:
        content = json.loads(Path(error_file).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return ended
    message = _fields(content).get("message")
    if isinstance(message, str):
        return replace(ended, error=_one_line(message))
    if not isinstance(message, dict):
        return ended
    fields = _fields(message)
    extra = _fields(fields.get("extraInfo"))
    moment = _moment(extra.get("perdure_time")) or _moment(extra.get("timestamp"))
    if ended.pid is not None and extra.get(WRITER, ended.pid) != ended.pid and not _has_ended_its_parent(ended, moment):
        return ended
    callstack = extra.get("py_callstack")
    status = fields.get(STATUS)
    if ended.exit_code and isinstance(status, int) and status and -signal.NSIG < status <= _LARGEST_EXIT_CODE:
        # A launcher below the rank says how the process ended that failed.
        exit_code, signal_number = split_status(status)
        ended = replace(ended, exit_code=exit_code, signal=signal_number)
    return replace(
        ended,
        error=_one_line(str(fields.get("message", ""))),
        traceback=_last_lines(callstack) if isinstance(callstack, str) else None,
        time=moment,
    )


def after_others(failed: RankExit, finished: Collection[int]) -> RankExit:
    """Adds which ranks had ended with 0 before this one failed: it may have lost them while it still trained.

    Args:
        failed: A rank.
        finished: The numbers of others in its world.
    """
    if not failed.error or not finished:
        return failed
    shown = [f"rank {rank}" for rank in sorted(finished)[:_SHOWN_RANKS]]
    more = " and others" if len(finished) > len(shown) else ""
    before = f"({', '.join(shown)}{more} had ended with exit code 0 before)"
    return replace(failed, error=f"{failed.error[: LONGEST_ERROR - len(before) - 1]} {before}")


def _has_ended_its_parent(ended: RankExit, moment: float | None) -> bool:
    """Returns whether the uncaught error of a process below a rank may be why the rank has just ended: shells and other
    wrappers end with an exit code, soon after what they wrap. Otherwise the rank has handled the error."""
    return bool(ended.exit_code) and moment is not None and time.time() - moment < _AFTER_CHILD_S


def _one_line(text: str) -> str:
    line = well_formed(" ".join(text.split()))
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"


def _last_lines(callstack: str) -> str:
    return well_formed(callstack[-LONGEST_TRACEBACK:])[-LONGEST_TRACEBACK:]


def _fields(content: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _moment(value: Any) -> float | None:
    """Converts a time to seconds since the epoch; torch writes it as text."""
    try:
        moment = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return moment if math.isfinite(moment) else None


def signal_rank(pid: int, number: signal.Signals) -> None:
    """Signals a rank that torchrun has started; it counts as running until the processes that handle the signal have
    ended."""
    if handling := signal_child(pid, number):
        threading.Thread(target=_continue_late, args=(pid, number, handling), name="wrapper", daemon=True).start()


def _continue_late(pid: int, number: signal.Signals, handling: Sequence[int]) -> None:
    for descriptor in handling:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
        os.close(descriptor)
    continue_child(pid, number)


class ExitSpool:
    """Exits that torchrun has detected and the agent has not received yet; the launcher reads them if torchrun dies."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, exits: Sequence[RankExit]) -> None:
        """Writes the exits. Errors are ignored: on a full disk the exits still arrive through the socket."""
        with contextlib.suppress(OSError):
            write_file(self._path, json.dumps({"exits": [asdict(item) for item in exits]}))

    def read(self, *, started_after: float) -> tuple[RankExit, ...]:
        """Reads the exits written since `started_after`. Ranks can write to the file, so it may have any content."""
        try:
            if self._path.stat().st_mtime < started_after:
                return ()
            exits = _fields(json.loads(self._path.read_text())).get("exits")
        except (OSError, ValueError, RecursionError):
            return ()
        found: list[RankExit] = []
        for item in cast("list[Any]", exits) if isinstance(exits, list) else []:
            with contextlib.suppress(Malformed):
                found.append(decode(RankExit, item))
        return tuple(found)

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


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
        """Returns the exits collected since the last call, with those of ranks that died just before torchrun stopped
        all of them, which it does not log. Called by the handler's `next_rendezvous`."""
        exits, self._exits = self._exits, []
        # torchrun must continue whatever this release of it has.
        with contextlib.suppress(Exception):
            known = {one.local_rank for one in exits}
            unlogged = unlogged_failures(terminated=self._terminated, exit_of=self._exit_of)
            exits += [one for one in unlogged if one.local_rank not in known]
        self._terminated.clear()
        return exits

    def filter(self, record: logging.LogRecord) -> bool:
        """Reads the record, and lets it pass."""
        # torchrun must continue with any record, including those of releases that are not known here.
        with contextlib.suppress(Exception):
            if exits := logged_failures(record, terminated=self._terminated, exit_of=self._exit_of):
                finished = [self.base_rank + local_rank for local_rank in finished_before(record)]
                self._exits += [after_others(failed, finished) for failed in exits]
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
                kill_group(pid)
        finally:
            os.close(descriptor)
