"""One event: what happened, when and where, with plain values only."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from perdure_training.events.plain import bounded


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


Id = tuple[str, int]
"""The process and the number of an event in it: what its identifier is made of."""


class _Ids:
    """Identifiers, unique among all processes of a job."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begins a process's own identifiers."""
        self.prefix = os.urandom(6).hex()
        self.numbers = itertools.count(1)


ids = _Ids()
"""The identifiers of this process."""
os.register_at_fork(after_in_child=ids.begin)


def new_id() -> Id:
    """Returns an identifier that no other event has."""
    return ids.prefix, next(ids.numbers)


def id_text(id: Id) -> str:
    """Returns the identifier as events have it."""
    prefix, number = id
    return f"{prefix}-{number:x}"


Draft = tuple[Id | str, float, str, str, EventType, dict[str, Any], int | None, int | None]
"""What an emitter hands to exporters: an event, but for what can be made of it later, in their threads.

The fields are those of `Event` without the process. No value of the attributes can change any more.
"""


def finish(draft: Draft) -> Event:
    """Makes the event of a draft; called in the process that made the draft."""
    id, time, target, name, type, attributes, rank, generation = draft
    text = id if isinstance(id, str) else id_text(id)
    return Event(text, time, target, name, type, bounded(attributes), os.getpid(), rank, generation)
