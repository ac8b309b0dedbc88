"""Chooses what a node that failed tells of its output, so that the job can compare it with that of other nodes.

Nodes print the same lines with other numbers, so a line is known by its text without them. What a node prints again and
again is no sign of a failure, whoever else prints it; so are the traceback and torchrun's words about it, which follow
from the failure and are reported otherwise.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path

from perdure.agent.config import AgentConfig
from perdure.agent.files import log_tail
from perdure.agent.log_reader import read_log
from perdure.agent.output_errors import without_prefix
from perdure.agent.state import AgentState
from perdure.contract.agents import MOST_KEYS, MOST_RARE_LINES, PrintedLines, RareLine
from perdure.contract.worlds import World

_AROUND = timedelta(seconds=60)
"""Lines that were printed up to this long before a failure may say why."""

_NEWEST = 400
"""Lines of that time that are looked at."""

_RARE = 2
"""A line that was printed more often is what this node always prints."""

_TELLING = 3
"""Nodes of a world, the first ones, that tell what they have printed when a newer one follows."""

_COMPARED_OUTPUT = 64 * 1024
"""Bytes of their output."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_VARYING = re.compile(r"\b0x[0-9a-f]+\b|\b[0-9a-f]{8,}(-[0-9a-f]{4,})*\b|\d+([.,:]\d+)*", re.IGNORECASE)
"""What differs between the same line of two ranks: addresses, identifiers, times and other numbers."""

_OF_TORCHRUN = re.compile(
    r"torch[./]distributed[./]elastic|ChildFailedError|^[=-]{20,}|^(Root Cause|Failures:|perdure: )"
)
_TRACEBACK = "Traceback (most recent call last)"


def printed_lines(run_dir: Path, output: str, *, generation: int, failed_at: datetime) -> PrintedLines:
    """Returns the keys of the newest lines that a node has printed, and the lines that it has printed rarely.

    Args:
        run_dir: Its run directory.
        output: The end of its output.
        generation: The generation in which it failed.
        failed_at: When it failed, by its own clock.
    """
    keys = [_key(line) for line in _lines(output)]
    counted = Counter(keys)
    try:
        newest = read_log(run_dir, lines=_NEWEST, since=failed_at - _AROUND).text
    except OSError:
        newest = ""
    rare = {_key(line): line for line in _without_errors(_lines(newest))}
    chosen = (RareLine(text=line, key=key) for key, line in reversed(rare.items()) if 0 < counted[key] <= _RARE)
    return PrintedLines(
        generation=generation,
        keys=tuple(dict.fromkeys(reversed(keys)))[:MOST_KEYS],
        rare=tuple(islice(chosen, MOST_RARE_LINES)),
    )


def printed_before(config: AgentConfig, state: AgentState, newer: World | None) -> PrintedLines | None:
    """Returns what a node has printed in the world in which it trains, if a newer one ends that: the job may look for
    what another node alone has printed. A few nodes of a world tell it.

    Args:
        config: The configuration of its agent.
        state: The state before it takes the world.
        newer: The world that it is given.
    """
    member = newer.member(config.node) if newer is not None else None
    if newer is None or member is None or member.group_rank >= _TELLING or config.most_nodes == 1:
        return None
    if not state.has_ranks or not state.entered or newer.generation <= state.generation:
        return None
    output = log_tail(config.run_dir, _COMPARED_OUTPUT, since=state.output_since)
    keys = dict.fromkeys(_key(line) for line in reversed(list(_lines(output))))
    return PrintedLines(generation=state.entered, keys=tuple(islice(keys, MOST_KEYS)))


def _lines(output: str) -> Iterator[str]:
    for line in output.splitlines():
        if text := _ESCAPES.sub("", without_prefix(line)).rstrip():
            yield text


def _key(line: str) -> int:
    return zlib.crc32(_VARYING.sub("#", line).encode(errors="replace"))


def _without_errors(lines: Iterable[str]) -> Iterator[str]:
    """Leaves out tracebacks with the errors that they end with, and what torchrun says of them."""
    in_traceback = False
    for line in lines:
        if line.startswith(_TRACEBACK):
            in_traceback = True
        elif in_traceback:
            in_traceback = line[0].isspace()
        elif not line[0].isspace() and not _OF_TORCHRUN.search(line):
            yield line
