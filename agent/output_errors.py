"""Finds the errors that ended ranks in what they printed.

A rank writes its error file only once it has imported torch, and never where C++ code aborts it: NCCL's watchdog, an
assertion. Then its last traceback, or what `std::terminate` printed, is all there is.

Programs print tracebacks of errors that they handle, too, and train on. Such a traceback explains no end, so it counts
only where the process ended by it: where Python printed it for an uncaught exception, or where it is the last thing
that was printed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import replace

from perdure.contract.agents import RankExit
from perdure.contract.base import shorten

_PREFIX = re.compile(r"\[(?:rank(?P<rank>\d{1,9})|[A-Za-z_]\w*)\]:[ ]?")
"""What torch, once it has a process group, and `torchrun --tee` print before each line. Only torch's is a global
rank, and torch prints it before uncaught exceptions only."""
_TRACEBACK = re.compile(
    r'Traceback \(most recent call last\):|  File "[^"]*", line \d+|╭─+ Traceback \(most recent call last\) ─'
)
"""The beginning of a traceback as Python prints it, or as `rich` draws it."""
_FRAMES = re.compile(r"[\s│╰]|$")
"""Lines between the beginning of a traceback and its exception."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")
_OF_TORCHRUN = re.compile(r"torch\.distributed\.elastic\.|.*\bChildFailedError\b")
"""torchrun's own exceptions only repeat that a rank has failed."""
_ABORT = "terminate called after throwing an instance of "
_WHAT = re.compile(r"\s*what\(\):\s*")
_AFTER_AN_ERROR = re.compile(
    r"\s|[IWEFC]\d{4} |perdure: |wandb: |frame #\d|Exception raised from |Exception ignored |\[[IWEF]\d{4} "
    r"|During handling of the above exception|The above exception was the direct cause"
    r"|CUDA kernel errors might be |For debugging consider passing |Compile with `TORCH_USE_CUDA_DSA`|Search for `cuda"
    r"|Device-side assertion|[\w./<>-]{1,200}:\d+: \w{0,40}Warning: "
)
"""Beginnings of lines that follow the error which ended a process: the rest of its text, logs of torch, and what Python
and libraries print on their way out."""
_UNCAUGHT = 1
"""Python's exit code after an uncaught exception."""

Errors = dict[int | None, str]
"""The last error by global rank; None for lines that name no rank."""


def exceptions_in(output: str, *, last: bool = False) -> Errors:
    """Returns the exceptions whose tracebacks Python printed.

    Args:
        output: What ranks, and the command that started them, have printed.
        last: Leave out what is followed by other output: whoever printed it has continued. This holds for no line with
            torch's prefix.
    """
    found: Errors = {}
    open_traces: set[int | None] = set()
    for rank, line in _lines(output):
        if _TRACEBACK.match(line):
            open_traces.add(rank)
        elif rank in open_traces and not _FRAMES.match(line):
            open_traces.discard(rank)
            if _OF_TORCHRUN.match(line):
                if rank is None and last:
                    # torchrun describes the failure of its ranks from here on.
                    break
            elif _EXCEPTION.match(line):
                found[rank] = line.strip()
        elif last and rank is None and rank in found and rank not in open_traces and not _follows_an_error(line):
            del found[rank]
    return found


def _follows_an_error(line: str) -> bool:
    return not line or _AFTER_AN_ERROR.match(line) is not None


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


def explained(ranks: tuple[RankExit, ...], output: str, *, trained: bool = False) -> tuple[RankExit, ...]:
    """Adds the error to each exit that has none, as far as the output since its world began has it.

    Args:
        ranks: The exits.
        output: What was printed since their world began.
        trained: They have made steps in it, so torch was imported, and an uncaught exception would be in an error file.
    """
    if all(rank.error for rank in ranks):
        return ranks
    aborts, exceptions, last = aborts_in(output), exceptions_in(output), exceptions_in(output, last=True)

    def error(rank: RankExit) -> str | None:
        if rank.error or (rank.signal is not None and rank.signal != signal.SIGABRT) or rank.exit_code == 0:
            return rank.error
        printed = last if trained or rank.exit_code != _UNCAUGHT else exceptions
        errors = aborts if rank.signal == signal.SIGABRT else printed
        found = errors.get(rank.global_rank) or errors.get(None)
        return shorten(found) if found else None

    return tuple(replace(rank, error=error(rank)) for rank in ranks)


def command_error(output: str, exit_code: int | None, *, trained: bool = False) -> str | None:
    """Returns the error that ended a command which had started no rank, or whose ranks are not known; the arguments
    are those of `explained`."""
    return exceptions_in(output, last=trained or exit_code != _UNCAUGHT).get(None)


def without_prefix(line: str) -> str:
    """Returns a line without what torch or torchrun have printed before it."""
    prefix = _PREFIX.match(line)
    return line[prefix.end() :] if prefix else line


def _lines(output: str) -> Iterator[tuple[int | None, str]]:
    for line in output.splitlines():
        prefix = _PREFIX.match(line)
        rank = int(prefix["rank"]) if prefix and prefix["rank"] else None
        yield rank, line[prefix.end() :] if prefix else line
