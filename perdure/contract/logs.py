"""Reading a node's log through its agent: the question, and one piece of the answer."""

from __future__ import annotations

from typing import ClassVar, Literal

from perdure.contract.base import Message, Time
from perdure.contract.questions import Question

__all__ = ["LONGEST_LINE", "LineTime", "LogChunk", "LogPosition", "ReadLog"]

PART_TIMES = "times"
"""The suffix of the file beside a part of a log that has the times of its lines, as JSON: pairs of the number of a line
in the part and of the time, in seconds since 1970, of that line and those that follow. A part without one has no
times."""

COMPLETE = "complete"
"""The file beside the parts of a log that says that nothing follows: the agent has copied the log as it ended."""

LONGEST_LINE = 16 * 1024
"""Characters of a line that views of a log show."""


class LogPosition(Message):
    """A position in a node's log, which consists of several files once it was rotated."""

    file: int
    """The file's inode number, because its name changes when the log is rotated."""
    offset: int
    """The offset in that file, in bytes."""
    head: int = 0
    """A checksum of the file's beginning, since a newer file may have the inode number of a deleted one; 0: unknown."""


class ReadLog(Question):
    """Requests a piece of a node's log."""

    subject: ClassVar[str] = "log"
    activity: Literal["read_log"] = "read_log"
    position: LogPosition | None = None
    """The position at which to begin; None for the beginning, or as `lines` says."""
    lines: int | None = None
    """Without a position: begin this many lines before the end."""
    since: Time | None = None
    """Without a position: begin with what was printed then, by the node's clock; what `lines` leaves out stays out."""


class LineTime(Message):
    """The time at which lines were printed: from this line up to that of the next mark."""

    line: int
    """The number in the piece of the first of them; 0 is the line in which the piece begins."""
    at: Time


class LogChunk(Message):
    """A piece of a log: at most 256 KiB of it."""

    text: str = ""
    times: tuple[LineTime, ...] = ()
    """When its lines were printed, as far as that is known; at most 1,000."""
    position: LogPosition | None = None
    """The position of the next piece; None where the log is empty."""
    left_out: int = 0
    """Bytes between this piece and the next one: the middle of a long line."""
    at_end: bool = True
    """The piece reaches the current end of the log."""
