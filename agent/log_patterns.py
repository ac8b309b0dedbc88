"""Looks for the patterns of `retry.rules` in what a node that failed has printed.

A user's pattern may take exponential time for a line that it almost fits, and the agent does nothing else meanwhile.
Python's matcher looks for signals while it works, so a timer of the agent's own processor time ends the search.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perdure.contract.agents import RuleMatch

_LONGEST_SEARCH = 0.5
"""Seconds of processor time for one pattern: a simple one takes a few milliseconds for the whole output."""

_LONGEST_LINE = 1_000


class _TookTooLong(Exception):
    pass


def matches_in(output: str, patterns: Mapping[int, str]) -> tuple[RuleMatch, ...]:
    """Returns the rules whose pattern fits a line of the output, each with the newest such line."""
    if not patterns:
        return ()
    lines = [line[:_LONGEST_LINE] for line in reversed(output.splitlines()) if line and not line.isspace()]
    found = (_match(rule, pattern, lines) for rule, pattern in sorted(patterns.items()))
    return tuple(one for one in found if one is not None)


def _match(rule: int, pattern: str, lines: Sequence[str]) -> RuleMatch | None:
    try:
        with _limited():
            fits = re.compile(pattern).search
            line = next((line for line in lines if fits(line)), None)
    except re.error:
        # Another release has accepted it.
        return None
    except _TookTooLong:
        return RuleMatch(rule=rule, too_slow=True)
    return None if line is None else RuleMatch(rule=rule, line=line.strip())


@contextmanager
def _limited() -> Generator[None]:
    """Raises `_TookTooLong` in the body once it has used too much processor time. For the main thread only."""
    before = signal.signal(signal.SIGVTALRM, _interrupt)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_SEARCH)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _interrupt(*_: Any) -> None:
    raise _TookTooLong
