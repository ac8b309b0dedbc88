"""Event files: one line per event, with a size limit, which several processes may write at the same time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from perdure_training.events.event import Event
from perdure_training.events.exporter import EventsLost, Exporter
from perdure_training.events.formats import Format, json_line

MAX_BYTES = 8 * 1024 * 1024
"""Bytes of a file at which the next one begins: about 40,000 events. A rank's files stay below 32 MiB."""
KEPT = 3
"""Older files that are kept."""
_CHUNK = 1 << 18
"""Bytes that are written at once, and by which a file may exceed its limit."""

_WRITTEN_WITHIN = 0.02
"""Seconds within which another process completes a write. If it takes longer, an empty line precedes its next one."""


class FileExporter(Exporter):
    """Appends events to a file. When it is full, it is renamed to `….1`, the one before to `….2`, and so on.

    Lines of several processes do not mix: each write appends whole lines. A line that a full disk cut off is ended
    before the next one.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, format: Format = json_line, max_bytes: int = MAX_BYTES, kept: int = KEPT
    ) -> None:
        """Creates the exporter; the file is opened with the first event.

        Args:
            path: The file. Its folder is created.
            format: Makes the lines: `json_line` or `text_line`.
            max_bytes: Bytes at which the next file begins.
            kept: The number of older files.

        Raises:
            ValueError: if a number is out of range.
        """
        if max_bytes < 1 or kept < 0:
            raise ValueError(f"max_bytes: expected at least 1, found {max_bytes}; kept: at least 0, found {kept}")
        self._path = Path(path)
        self._format = format
        self._max_bytes = max_bytes
        self._kept = kept
        self._file = -1
        self._cut_off = False

    def export(self, events: Sequence[Event]) -> None:
        lines, size, done = list[bytes](), 0, 0
        for event in events:
            line = self._format(event)
            if lines and size + len(line) > _CHUNK:
                self._write(lines, missing=len(events) - done)
                done += len(lines)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        if lines:
            self._write(lines, missing=len(events) - done)

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def after_fork(self) -> None:
        # A lock on the file would be the parent's as well.
        with contextlib.suppress(OSError):
            self.close()

    def _write(self, lines: list[bytes], *, missing: int) -> None:
        """Appends whole lines.

        Raises:
            EventsLost: if the disk does not accept all; `missing` and those of these lines that it did are counted.
        """
        written = 0
        data = b"".join(lines)
        try:
            self._follow_rotation()
            if self._cut_off:
                os.write(self._file, b"\n")
                self._cut_off = False
            while written < len(data):
                count = os.write(self._file, data[written:])
                if count == 0:
                    raise OSError(errno.ENOSPC, "nothing was written")
                written += count
        except OSError as error:
            complete = data.count(b"\n", 0, written)
            self._cut_off = self._cut_off or (written > 0 and data[written - 1 : written] != b"\n")
            raise EventsLost(f"{self._path}: {error}", count=missing - complete) from error

    def _follow_rotation(self) -> None:
        """Opens the file, or the next one if it is full; another process may have done the same."""
        found = self._current()
        if found is None:
            self.close()
            self._open()
            found = os.fstat(self._file)
        if found.st_size >= self._max_bytes:
            self._rotate()

    def _current(self) -> os.stat_result | None:
        """The status of the open file; None if none is open, or another one has its place."""
        if self._file < 0:
            return None
        try:
            own, found = os.fstat(self._file), os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return own if (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino) else None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Training code can write to the folder: a link or a pipe there must neither be followed nor block.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(self._path, flags, 0o644)
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file")
        self._cut_off = not self._ends_with_line() and not self._is_being_written()

    def _ends_with_line(self) -> bool:
        size = os.fstat(self._file).st_size
        return size == 0 or os.pread(self._file, 1, size - 1) == b"\n"

    def _is_being_written(self) -> bool:
        """Returns whether another process writes the line at the end at this moment, so that it is not cut off."""
        until = time.monotonic() + _WRITTEN_WITHIN
        while time.monotonic() < until:
            # Nothing tells when a write of another process is complete.
            time.sleep(_WRITTEN_WITHIN / 20)
            if self._ends_with_line():
                return True
        return False

    def _rotate(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another process renames the files at this moment; this one follows with its next write.
            return
        if self._current() is not None:
            for number in range(self._kept, 0, -1):
                newer = self._numbered(number - 1)
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(self._numbered(number))
            if self._kept == 0:
                self._path.unlink()
        self.close()
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path
