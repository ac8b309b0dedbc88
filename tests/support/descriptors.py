"""Finds tests that leave files and sockets open: one process runs thousands of tests, with 1,024 descriptors."""

from __future__ import annotations

import gc
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest

_ALLOWED = 12
"""Descriptors that may stay of a file's tests: fixtures of the whole session, and clients whose end is not awaited."""

_LONGEST = 10.0
"""Seconds: connections of Temporal's client close in threads of their own."""

_OPEN = Path("/dev/fd")

_before: dict[Path, Counter[str]] = {}
_of_session: set[int] = set()


def keep(descriptor: int) -> None:
    """Says that a descriptor, which is not counted then, stays open for as long as this process lives."""
    _of_session.add(descriptor)


def note_file(item: pytest.Item) -> None:
    """Notes what is open before the first test of a file."""
    if item.path not in _before:
        _before.clear()
        _before[item.path] = _opened()


def check_file(item: pytest.Item) -> None:
    """Fails where the tests of this file have left more open than there was.

    Raises:
        AssertionError: names the kinds of what is open.
    """
    before = _before.pop(item.path, None)
    if before is None or _more_than(before).total() <= _ALLOWED:
        return
    gc.collect()
    deadline = time.monotonic() + _LONGEST
    while (more := _more_than(before)).total() > _ALLOWED:
        if time.monotonic() > deadline:
            kinds = ", ".join(f"{count} of {kind}" for kind, count in more.most_common(5))
            raise AssertionError(f"{item.path.name}: its tests have left {more.total()} descriptors open: {kinds}")
        time.sleep(0.05)


def _more_than(before: Counter[str]) -> Counter[str]:
    return _opened() - before


def _opened() -> Counter[str]:
    """Returns how many descriptors of each kind are open, without the numbers in their names."""
    kinds: Counter[str] = Counter()
    for name in set(os.listdir(_OPEN)) - set(map(str, _of_session)):
        try:
            target = os.readlink(_OPEN / name)
        except OSError:
            target = "a closed descriptor" if not _is_open(int(name)) else "a descriptor"
        kinds[re.sub(r"\d+", "N", target)] += 1
    return kinds


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
