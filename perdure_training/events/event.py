"""One event: what happened, when and where, with plain values only."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class EventType(StrEnum):
    """The part of an occurrence that an event reports."""

    BEGIN = "begin"
    END = "end"
    INSTANT = "instant"


class Event(NamedTuple):
    """Something that happened in a job.

    It is a named tuple, which is made in a third of the time of a frozen dataclass: training makes it.
    """

    id: str
    """Begin and end of a span have the same one. It ends with the event's number in its process, in hexadecimal, which
    grows even if the clock is set back."""
    time: float
    """Seconds since the epoch, by the machine's clock."""
    target: str
    """The part that the event is about, which is also its vocabulary: `job`, `agent`, `trainer`, `torchelastic`, or a
    program's own."""
    name: str
    type: EventType
    attributes: Mapping[str, Any]
    """Values that JSON has: texts, numbers, truth values, None, and lists and mappings of them."""
    pid: int
    """The process that emitted the event."""
    rank: int | None = None
    """The global rank that the event is about; None if it is about no single rank."""
    generation: int | None = None
    """The generation of the world; None outside of one."""


class _Ids:
    """Identifiers, unique among all processes of a job."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins a process's own identifiers."""
        self._prefix = os.urandom(6).hex()
        self._numbers = itertools.count(1)

    def next(self) -> str:
        return f"{self._prefix}-{next(self._numbers):x}"


_ids = _Ids()
os.register_at_fork(after_in_child=_ids.begin)


def new_id() -> str:
    """Returns an identifier that no other event has."""
    return _ids.next()
