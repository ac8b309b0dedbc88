"""An index beside each file of a log, of when its bytes were printed.

Scripts print lines as they like, so the log itself holds no times. The launcher writes the index; who reads logs of
several nodes orders the lines by it. A log is whole without its index: only its order among others is unknown then.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

RESOLUTION = 0.02
"""Seconds. Bytes printed within that long of each other share an entry: a chatty command writes 800 bytes of index a
second."""

_RECORD = struct.Struct("<Qd")
_MOST_RECORDS = 1000
"""The number of entries that are read at once; more are thinned out."""


class Entry(NamedTuple):
    """Says when a log's bytes were printed, up to the offset of the next entry."""

    offset: int
    time: float
    """Seconds since 1970, by the clock of the node."""


class TimesWriter:
    """Writes the index of one file. Never raises: on a full disk entries are missing."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file = -1
        self._last: float | None = None

    def note(self, offset: int) -> None:
        """Says that the bytes from this offset on are printed now."""
        now = self._clock()
        # A clock may have been set back.
        if self._last is not None and 0 <= now - self._last < RESOLUTION:
            return
        try:
            if self._file < 0:
                self._open()
            if os.write(self._file, record := _RECORD.pack(offset, now)) < len(record):
                self._drop_part()
                return
        except OSError:
            return
        self._last = now

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o644)
        # The agent may run as another user: the mode must not depend on the umask.
        os.fchmod(self._file, 0o644)
        self._drop_part()

    def _drop_part(self) -> None:
        """Removes an entry that is not whole: all that follow it would be misread."""
        size = os.fstat(self._file).st_size
        os.ftruncate(self._file, size - size % _RECORD.size)

    def close(self) -> None:
        """Closes the file; the next entry opens it again."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._last = -1, None


def line_times(index: BinaryIO, begin: int, content: bytes) -> list[tuple[int, float]]:
    """Returns when the lines of a piece of a log were printed, at most a thousand times.

    Args:
        index: The file's index.
        begin: The offset of the piece in the file.
        content: The piece.

    Returns:
        The number of a line in the piece, where 0 is the one in which it begins, and the time at which that line and
        those up to the next number were begun.

    Raises:
        OSError: if the index cannot be read.
    """
    times: list[tuple[int, float]] = []
    line, counted = 0, 0
    for offset, moment in _entries(index, begin, begin + len(content)):
        upto = min(max(offset - begin, counted), len(content))
        line += content.count(b"\n", counted, upto)
        counted = upto
        begins_line = upto == 0 or content[upto - 1 : upto] == b"\n"
        times.append((line if begins_line else line + 1, moment))
    return times


def _entries(index: BinaryIO, begin: int, end: int) -> Sequence[Entry]:
    """Returns the entry that holds for the byte at `begin`, and those that follow before `end`."""
    first = max(_position(index, lambda entry: entry.offset > begin) - 1, 0)
    last = _position(index, lambda entry: entry.offset >= end)
    step = max(-(-(last - first) // _MOST_RECORDS), 1)
    return [_read(index, number) for number in range(first, last, step)]


def offset_since(index: BinaryIO, moment: float) -> int | None:
    """Returns the offset of the first byte that was printed then or later; None if there is none yet.

    Raises:
        OSError: if the index cannot be read.
    """
    number = _position(index, lambda entry: entry.time >= moment)
    return _read(index, number).offset if number < _count(index) else None


def _position(index: BinaryIO, reached: Callable[[Entry], bool]) -> int:
    """Returns the number of the first entry of which that is true."""
    low, high = 0, _count(index)
    while low < high:
        middle = (low + high) // 2
        if reached(_read(index, middle)):
            high = middle
        else:
            low = middle + 1
    return low


def _count(index: BinaryIO) -> int:
    return os.fstat(index.fileno()).st_size // _RECORD.size


def _read(index: BinaryIO, number: int) -> Entry:
    index.seek(number * _RECORD.size)
    return Entry(*_RECORD.unpack(index.read(_RECORD.size)))
