"""Collects the stacks of this node's ranks and their collectives, with what the kernel says of each: its state, and its
processor time.

A rank that does not answer is evidence, too: it is stopped, or sleeps in the kernel where no signal reaches it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from perdure_training.node_api.bodies import RankCollective, RankCollectives, RankStacks
from perdure_training.node_api.codec import LONGEST_TEXT, decode
from perdure_training.node_api.layout import PROGRESS, STACKS
from perdure_training.node_api.progress_file import progress_path, read_progress

from ..rank_plugins.collectives import MOST_GROUPS
from ..rank_plugins.stacks import STACKS_SIGNAL, StackFile, is_answered_by
from ..system import processes
from ..system.processes import Process

ANSWER_WITHIN = 2.0
"""Seconds for which ranks are waited for. A rank answers within a few milliseconds, if it gets a processor."""
_LOOK_EVERY = 0.05
_TRACED = "t"
"""The kernel's letter for a process that its debugger has stopped, told of one that a debugger lets run, too."""
_STOPPED = f"T{_TRACED}"
_SILENT = f"{_STOPPED}D"
"""States of the kernel in which a process does not answer."""
_MOST_RANKS = 64
"""Ranks of one report: far more than a machine has devices. A report is at most 1 MiB large."""
_LONGEST_ANSWER = 256 * 1024
"""Bytes that are read of one file: faulthandler writes at most 100 threads of 100 frames, and training code can write
there, too."""
_LONGEST_COLLECTIVES = 16 * 1024
"""Bytes that are read of one rank's collectives."""
_COLLECTIVES_WITHIN = 0.5
"""Seconds for the collectives of one rank: one whose interpreter is blocked does not tell them."""


@dataclass
class _Rank:
    """A rank that was asked."""

    path: Path
    mark: StackFile
    ticks: int
    """Its processor time when it was asked."""
    switches: int | None
    """How often its main thread had left a processor by then."""
    length: int = 0
    answered: bool = False


def collect(
    run_directory: Path, *, by_signal: bool = True, monotonic: Callable[[], float] = time.monotonic
) -> tuple[RankStacks, ...]:
    """Asks the ranks of the newest generation that runs here for their stacks, all at once, and for their collectives.

    Args:
        run_directory: The node's.
        by_signal: Ask them for their stacks; otherwise only the kernel and torch's flight recorder are asked.
        monotonic: The clock.
    """
    ranks = _ranks(run_directory / STACKS)
    asked = [rank for rank in ranks if is_answered_by(rank.path)] if by_signal else []
    begun = monotonic()
    for rank in asked:
        if _answers(rank.mark.pid):
            with contextlib.suppress(OSError):
                os.truncate(rank.path, 0)
                os.kill(rank.mark.pid, STACKS_SIGNAL)
    while (passed := monotonic() - begun) < ANSWER_WITHIN and not all(_has_answered(rank) for rank in asked):
        time.sleep(_LOOK_EVERY)
    # Over a shorter time the kernel's ticks of 10 ms say nothing.
    time.sleep(max(0.0, 0.2 - passed))
    reports = [
        _report(
            rank, seconds=monotonic() - begun, not_asked="" if rank in asked else _why_not_asked(by_signal=by_signal)
        )
        for rank in ranks
    ]
    # Each one that does not answer takes all of its time.
    with ThreadPoolExecutor(_MOST_RANKS) as pool:
        told = pool.map(_collectives, ranks, reports)
        return tuple(
            replace(report, collectives=collectives) for report, collectives in zip(reports, told, strict=True)
        )


def _ranks(folder: Path) -> Sequence[_Rank]:
    """Returns the ranks that can be asked, by rank; files of processes that have ended are deleted."""
    found: list[_Rank] = []
    own = {process.pid: process for process in processes.descendants() if not process.zombie}
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    for name in names:
        mark = StackFile.parse(name)
        if mark is None:
            continue
        process = own.get(mark.pid)
        if process is not None and process.start_ticks == mark.start_ticks:
            switches = processes.context_switches(process.pid)
            found.append(_Rank(folder / name, mark, process.cpu_ticks, switches))
        else:
            for left in (name, mark.socket):
                with contextlib.suppress(OSError):
                    os.unlink(folder / left)
    newest = max((rank.mark.generation for rank in found), default=0)
    of_newest = sorted((rank for rank in found if rank.mark.generation == newest), key=lambda rank: rank.mark)
    by_rank = {number: list(same) for number, same in groupby(of_newest, key=lambda rank: rank.mark.rank)}
    progress = folder.parent / PROGRESS
    return [_speaker(same, own, progress) for same in by_rank.values()][:_MOST_RANKS]


def _speaker(same: Sequence[_Rank], own: Mapping[int, Process], progress: Path) -> _Rank:
    """Returns the one of these processes that trains as their rank: the one that steps, or before that the one that
    has started the others."""
    if len(same) == 1:
        return same[0]
    mark = same[0].mark
    written = read_progress(progress_path(progress, mark.rank), beneath=progress.parent)
    if written is not None and written.generation == mark.generation:
        for rank in same:
            if rank.mark.pid == written.pid:
                return rank
    others = {rank.mark.pid for rank in same}
    return next((rank for rank in same if not others.intersection(_ancestors(rank.mark.pid, own))), same[0])


def _ancestors(pid: int, own: Mapping[int, Process]) -> Iterator[int]:
    process = own.get(pid)
    while process is not None:
        yield process.parent
        process = own.get(process.parent)


def _answers(pid: int) -> bool:
    """Returns whether the process has a handler for the signal, as the kernel says: without one it would end. One that
    a debugger follows is not asked, since most debuggers stop it at each signal."""
    if processes.is_traced(pid):
        return False
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    except (OSError, StopIteration, ValueError):
        return False


def _has_answered(rank: _Rank) -> bool:
    """Returns whether the whole answer is there: it grows no more."""
    try:
        length = os.stat(rank.path).st_size
    except OSError:
        return True
    rank.answered = 0 < length == rank.length
    rank.length = length
    return rank.answered


def _report(rank: _Rank, *, seconds: float, not_asked: str) -> RankStacks:
    process = processes.read_process(rank.mark.pid)
    same = process is not None and process.start_ticks == rank.mark.start_ticks
    if process is None or not same or process.zombie:
        return RankStacks(global_rank=rank.mark.rank, pid=rank.mark.pid, problem="it ended while it was asked")
    state = _TRACED if processes.is_traced(process.pid) else process.state
    used = (process.cpu_ticks - rank.ticks) / processes.TICKS_PER_SECOND
    family = (process, *processes.descendants(process.pid))
    transferred = [size for one in family if (size := processes.transferred_bytes(one.pid)) is not None]
    return RankStacks(
        global_rank=rank.mark.rank,
        pid=rank.mark.pid,
        generation=rank.mark.generation,
        state=state,
        cpu_percent=round(100 * used / seconds, 1) if seconds > 0 else None,
        cpu_seconds=sum(one.cpu_ticks for one in family) / processes.TICKS_PER_SECOND,
        switches=rank.switches,
        transferred_bytes=sum(transferred) if transferred else None,
        text="" if not_asked else main_thread_first(_read(rank.path)),
        problem=not_asked or ("" if rank.length else _why_silent(state)),
    )


def _collectives(rank: _Rank, report: RankStacks) -> tuple[RankCollective, ...]:
    """Returns in which collectives the rank is; empty where it does not tell."""
    if not report.state or report.state in _SILENT:
        return ()
    # The path itself may be too long for a socket.
    with contextlib.suppress(OSError, ValueError, RecursionError), socket.socket(socket.AF_UNIX) as connection:
        folder = os.open(rank.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.settimeout(_COLLECTIVES_WITHIN)
            connection.connect(f"/proc/self/fd/{folder}/{rank.mark.socket}")
            content = _received(connection)
        finally:
            os.close(folder)
        return decode(RankCollectives, json.loads(content)).groups[:MOST_GROUPS]
    return ()


def _received(connection: socket.socket) -> bytes:
    content, until = b"", time.monotonic() + _COLLECTIVES_WITHIN
    while len(content) < _LONGEST_COLLECTIVES and time.monotonic() < until and (part := connection.recv(4096)):
        content += part
    return content


def _why_not_asked(*, by_signal: bool) -> str:
    if by_signal:
        return f"its script has a handler of its own for signal {STACKS_SIGNAL:d}, by which ranks are asked"
    return "it was not asked"


def _why_silent(state: str) -> str:
    if state == _TRACED:
        return "a debugger is attached to it, so it is left alone"
    if state in _STOPPED:
        return "it is stopped (SIGSTOP), and answers once it continues"
    if state == "D":
        return "it sleeps in the kernel, where no signal reaches it: mostly it waits for a disk, a mount or a driver"
    return f"it has not answered within {ANSWER_WITHIN:g} s"


def _read(path: Path) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(_LONGEST_ANSWER).decode(errors="replace")
    except OSError:
        return ""


def main_thread_first(text: str) -> str:
    """Orders the threads from the oldest, the main thread, to the newest, and leaves out what a report cannot hold.

    faulthandler writes the newest thread first.
    """
    threads = [thread.strip("\n") for thread in text.split("\n\n") if thread.strip()]
    kept, length = list[str](), 0
    for thread in reversed(threads):
        length += len(thread) + 2
        if length > LONGEST_TEXT:
            break
        kept.append(thread)
    return "\n\n".join(kept)
