"""Writes the command's output to rotated files without ever blocking the command.

A full or hanging disk must not stop training, so the pipe is always read. The command waits once, for a moment, for a
disk that is merely busy. Output that cannot be written then is dropped and counted, and the log says how much is
missing where.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from perdure_training.node_api.layout import LOG_TIMES, OUTPUT_LOG, ROTATED_LOGS

from ..log_times import TimesWriter

logger = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 20
"""Size of the buffer for a slow disk; output beyond it is dropped."""
PATIENCE = timedelta(seconds=1)
"""Longest time for which the command waits for a disk. It does not wait again until the disk has accepted output."""
TAIL_BYTES = 16384
TAIL_CHARACTERS = 4000
_PIPE_BYTES = 1 << 20
_CHUNK = 1 << 16
_F_SETPIPE_SZ = 1031


class PartlyWritten(OSError):
    """The disk accepted only the first bytes."""

    def __init__(self, error: OSError, written: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.written = written


class RotatingFile:
    """A log file that becomes `.1`, `.2`, … when it is full, with the index of its times."""

    def __init__(
        self, path: Path, *, max_bytes: int, kept: int = ROTATED_LOGS, clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._times_path = path.with_name(LOG_TIMES)
        self._times = TimesWriter(self._times_path, clock=clock)
        self._max_bytes = max_bytes
        self._kept = kept
        self._file = -1
        self._size = 0

    def write(self, data: bytes) -> None:
        """Writes all bytes.

        Raises:
            PartlyWritten: if the disk does not accept them.
        """
        written = 0
        while written < len(data):
            try:
                if self._file < 0:
                    self._open()
                room = self._max_bytes - self._size
                if room <= 0:
                    self._rotate()
                    continue
                end = self._end_of_line(data, written, room)
                self._times.note(self._size)
                count = os.write(self._file, data[written:end])
                if count == 0:
                    raise OSError(errno.ENOSPC, "nothing was written")
            except OSError as error:
                raise PartlyWritten(error, written) from error
            written += count
            self._size += count

    def _end_of_line(self, data: bytes, start: int, room: int) -> int:
        """Returns where to split the data so that no line spans two files, unless it fills a whole one."""
        if len(data) - start <= room:
            return len(data)
        end = data.rfind(b"\n", start, start + room) + 1
        if end > start:
            return end
        if self._size > 0:
            self._rotate()
            return self._end_of_line(data, start, self._max_bytes)
        return start + room

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # The agent may run as another user: the mode must not depend on the umask.
        os.fchmod(self._file, 0o644)
        self._size = os.fstat(self._file).st_size

    def _rotate(self) -> None:
        self.close()
        for path in (self._path, self._times_path):
            for number in range(self._kept, 0, -1):
                older = path.with_name(f"{path.name}.{number}")
                newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
                if newer.exists():
                    newer.replace(older)
                else:
                    # What stays would be taken for the index of another part.
                    older.unlink(missing_ok=True)
        self._open()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._times.close()


class Sink(threading.Thread):
    """Writes data in the background, and drops data that does not fit its buffer."""

    def __init__(self, write: Callable[[bytes], None], *, name: str, capacity: int = BUFFER_BYTES) -> None:
        super().__init__(name=name, daemon=True)
        self._write = write
        self._capacity = capacity
        self._waiting = bytearray()
        self._busy = False
        self._unsaid = 0
        """Bytes lost since the last notice because of write errors."""
        self._overflowed = 0
        """Bytes lost after the buffered data, because the buffer was full."""
        self._stuck = False
        self._dropped = 0
        self._changed = threading.Condition()

    @property
    def dropped(self) -> int:
        """Bytes lost so far."""
        with self._changed:
            return self._dropped

    def offer(self, data: bytes) -> None:
        """Adds data to the buffer. Blocks for `PATIENCE` at most, and not at all if the last wait was in vain."""
        with self._changed:
            if not self._has_room(data) and not self._stuck:
                self._stuck = not self._changed.wait_for(lambda: self._has_room(data), PATIENCE.total_seconds())
            if self._has_room(data):
                if self._overflowed:
                    self._waiting += _notice(self._overflowed)
                    self._overflowed = 0
                self._waiting += data
            else:
                self._dropped += len(data)
                self._overflowed += len(data)
            self._changed.notify_all()

    def _has_room(self, data: bytes) -> bool:
        return len(self._waiting) + len(data) <= self._capacity

    def flush(self, timeout: timedelta) -> bool:
        """Waits until the buffer is written; returns False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout.total_seconds())

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = bytes(self._waiting) + (_notice(self._overflowed) if self._overflowed else b"")
                self._waiting.clear()
                self._overflowed = 0
                self._busy = True
                lost, self._unsaid = self._unsaid, 0
                self._changed.notify_all()
            try:
                if lost:
                    self._write(_notice(lost))
            except OSError:
                with self._changed:
                    self._unsaid += lost
            try:
                self._write(data)
            except OSError as error:
                with self._changed:
                    if not self._unsaid:
                        logger.warning("output is being dropped: %s", error)
                    self._lose(len(data) - (error.written if isinstance(error, PartlyWritten) else 0))
            with self._changed:
                self._busy = self._stuck = False
                self._changed.notify_all()

    def _lose(self, count: int) -> None:
        self._dropped += count
        self._unsaid += count


def _notice(lost: int) -> bytes:
    return f"perdure: {lost:,} bytes of output are missing here: the disk was full or slow\n".encode()


class Capture:
    """The destination of every attempt's output."""

    def __init__(self, *, logs: Path, max_bytes: int, stdout: bool) -> None:
        self._sinks = [Sink(RotatingFile(logs / OUTPUT_LOG, max_bytes=max_bytes).write, name="log")]
        if stdout:
            self._sinks.append(Sink(_write_stdout, name="stdout"))

    @property
    def dropped(self) -> int:
        """Bytes that did not reach the log file."""
        return self._sinks[0].dropped

    def start(self) -> None:
        for sink in self._sinks:
            sink.start()

    def write(self, data: bytes) -> None:
        for sink in self._sinks:
            sink.offer(data)

    def flush(self, timeout: timedelta) -> None:
        for sink in self._sinks:
            sink.flush(timeout)

    def open(self) -> Output:
        """Opens a pipe for one attempt. Its write end is for the command; the caller closes its own copy."""
        output = Output(self)
        output.start()
        return output


class Output(threading.Thread):
    """Reads the output of one attempt to its end, and keeps its last part."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(name="output", daemon=True)
        self._capture = capture
        self._read_end, self.write_end = os.pipe()
        self._grow_pipe()
        self._tail = bytearray()
        self._lock = threading.Lock()

    def _grow_pipe(self) -> None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.write_end, _F_SETPIPE_SZ, _PIPE_BYTES)

    def run(self) -> None:
        while data := os.read(self._read_end, _CHUNK):
            self.note(data)
        os.close(self._read_end)

    def note(self, data: bytes) -> None:
        """Adds text to the log, from the command or about it."""
        with self._lock:
            self._tail += data
            del self._tail[:-TAIL_BYTES]
        self._capture.write(data)

    def close_write_end(self) -> None:
        """Closes the write end after the command has inherited it; otherwise the output would never end."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def drain(self, timeout: timedelta) -> None:
        """Waits for the output's end, which may not come if a process outside of the tree holds the pipe."""
        self.join(timeout.total_seconds())

    @property
    def tail(self) -> str:
        """The last lines of the output, at most 4,000 characters."""
        with self._lock:
            content = bytes(self._tail)
        text = codecs.decode(content, "utf-8", "replace")
        if len(text) <= TAIL_CHARACTERS:
            return text
        text = text[-TAIL_CHARACTERS:]
        line_end = text.find("\n")
        return text[line_end + 1 :] if 0 <= line_end < len(text) - 1 else text


def _write_stdout(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
