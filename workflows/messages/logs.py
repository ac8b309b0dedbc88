"""Reading a node's log through its agent: the question, and one piece of the answer."""

from __future__ import annotations

from workflows.messages.base import Message


class LogPosition(Message):
    """A place in a node's log, which is several files once it was rotated."""

    file: int
    """Which one, by its inode number: names change when the log is rotated."""
    offset: int
    """Bytes of that file before it."""


class ReadLog(Message):
    """Argument of the workflow `ReadNodeLog`, and of agents' `read_log`: it changes nothing, and needs no token."""

    uid: str
    role: str
    rank: int
    incarnation: int
    position: LogPosition | None = None
    """From where; None for the beginning, or for what `lines` says."""
    lines: int | None = None
    """Without a position: begin with so many of the last lines."""


class LogChunk(Message):
    """A piece of a log: at most 256 KiB of it."""

    text: str = ""
    position: LogPosition | None = None
    """Where the next piece begins; None where nothing was printed yet."""
    at_end: bool = True
    """Nothing more is there now."""
