"""Reading a node's log through its agent: the question, and one piece of the answer."""

from __future__ import annotations

from workflows.messages.base import Message
from workflows.messages.identity import NodeId


class LogPosition(Message):
    """A position in a node's log, which consists of several files once it was rotated."""

    file: int
    """The file's inode number, because its name changes when the log is rotated."""
    offset: int
    """The offset in that file, in bytes."""


class ReadLog(NodeId):
    """Argument of the workflow `ReadNodeLog` and of the agents' `read_log`. Reading changes nothing and needs no
    token."""

    position: LogPosition | None = None
    """The position at which to begin; None for the beginning, or as `lines` says."""
    lines: int | None = None
    """Without a position: begin this many lines before the end."""


class LogChunk(Message):
    """A piece of a log: at most 256 KiB of it."""

    text: str = ""
    position: LogPosition | None = None
    """The position of the next piece; None where the log is empty."""
    at_end: bool = True
    """The piece reaches the current end of the log."""
