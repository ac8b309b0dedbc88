"""Finds the errors that ended ranks in what they printed.

A rank writes its error file only once it has imported torch, and never where C++ code aborts it: NCCL's watchdog, an
assertion. Then its last traceback, or what `std::terminate` printed, is all there is.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace

from perdure.contract.agents import RankExit
from perdure.contract.base import shorten

_PREFIX = re.compile(r"\[(?:rank(?P<rank>\d+)|[A-Za-z_]\w*)\]:[ ]?")
"""What torch, once it has a process group, and `torchrun --tee` print before each line. Only torch's is a global
rank."""
_TRACEBACK = re.compile(r'Traceback \(most recent call last\):|  File "[^"]*", line \d+')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")
_OF_TORCHRUN = re.compile(r"torch\.distributed\.elastic\.|.*\bChildFailedError\b")
"""torchrun's own exceptions only repeat that a rank has failed."""
_ABORT = "terminate called after throwing an instance of "
_WHAT = re.compile(r"\s*what\(\):\s*")

Errors = dict[int | None, str]
"""The last error by global rank; None for lines that name no rank."""


def exceptions_in(output: str) -> Errors:
    """Returns the exceptions whose tracebacks Python printed."""
    found: Errors = {}
    open_traces: set[int | None] = set()
    for rank, line in _lines(output):
        if _TRACEBACK.match(line):
            open_traces.add(rank)
        elif rank in open_traces and line and not line[0].isspace():
            open_traces.discard(rank)
            if _EXCEPTION.match(line) and not _OF_TORCHRUN.match(line):
                found[rank] = line.strip()
    return found


def aborts_in(output: str) -> Errors:
    """Returns the C++ exceptions that `std::terminate` printed, which ends a process with SIGABRT."""
    found: Errors = {}
    kinds: dict[int | None, str] = {}
    for rank, line in _lines(output):
        if line.startswith(_ABORT):
            kinds[rank] = line.removeprefix(_ABORT).strip().strip("'")
            found[rank] = kinds[rank]
        elif rank in kinds and (what := _WHAT.match(line)):
            found[rank] = f"{kinds.pop(rank)}: {line[what.end() :].strip()}"
    return found


def explained(ranks: tuple[RankExit, ...], output: str) -> tuple[RankExit, ...]:
    """Adds the error to each exit that has none, as far as the output since its world began has it."""
    if all(rank.error for rank in ranks):
        return ranks
    exceptions, aborts = exceptions_in(output), aborts_in(output)

    def error(rank: RankExit) -> str | None:
        if rank.error or (rank.signal is not None and rank.signal != signal.SIGABRT) or rank.exit_code == 0:
            return rank.error
        errors = aborts if rank.signal == signal.SIGABRT else exceptions
        found = errors.get(rank.global_rank) or errors.get(None)
        return shorten(found) if found else None

    return tuple(replace(rank, error=error(rank)) for rank in ranks)


def without_prefix(line: str) -> str:
    """Returns a line without what torch or torchrun have printed before it."""
    prefix = _PREFIX.match(line)
    return line[prefix.end() :] if prefix else line


def _lines(output: str) -> Iterator[tuple[int | None, str]]:
    for line in output.splitlines():
        prefix = _PREFIX.match(line)
        rank = int(prefix["rank"]) if prefix and prefix["rank"] else None
        yield rank, line[prefix.end() :] if prefix else line
