"""Logs in files of this machine."""

from __future__ import annotations

import codecs
import os
from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from perdure.client.logs.lines import Lines, PrintedLine
from perdure_launcher.log_times import line_times
from perdure_training.node_api.layout import LOG_TIMES, OUTPUT_LOG

_BLOCK = 1 << 16


class FileLog:
    """Reads one log from its last position, through rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part: _Part | None = None
        self._lines = Lines()

    async def old_lines(self, tail: int | None, since: datetime | None) -> AsyncGenerator[PrintedLine]:
        """Yields the existing lines, including those of rotated files."""
        lines = self._old_lines(since)
        for line in lines if tail is None else deque(lines, maxlen=tail):
            yield line

    async def new_lines(self) -> AsyncGenerator[PrintedLine]:
        """Yields the lines added since the last call."""
        for line in self._new_lines():
            yield line

    def last_line(self) -> Sequence[PrintedLine]:
        """The text after the last line break, if there is any."""
        return self._lines.rest()

    def close(self) -> None:
        if self._part:
            self._part.close()

    def _old_lines(self, since: datetime | None) -> Generator[PrintedLine]:
        for path in self._rotated_files():
            with suppress(FileNotFoundError):
                part = _Part(path)
                try:
                    yield from _since(part.read(self._lines), since)
                finally:
                    part.close()
        yield from _since(self._new_lines(), since)

    def _new_lines(self) -> Generator[PrintedLine]:
        while True:
            if self._part is None:
                try:
                    self._part = _Part(self._path)
                except FileNotFoundError:
                    return
            yield from self._part.read(self._lines)
            if not self._part.was_rotated():
                return
            # The last lines may have been written between the two.
            yield from self._part.read(self._lines)
            self._part.close()
            self._part = None

    def _rotated_files(self) -> list[Path]:
        numbered = [
            (int(path.suffix[1:]), path)
            for path in self._path.parent.glob(f"{self._path.name}.*")
            if path.suffix[1:].isdecimal()
        ]
        return [path for _, path in sorted(numbered, reverse=True)]


class _Part:
    """One open file of a log, and its index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        self._index: BinaryIO | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, lines: Lines) -> Generator[PrintedLine]:
        """Yields the lines up to the file's present end."""
        while block := self._file.read(_BLOCK):
            begin = self._file.tell() - len(block)
            yield from lines.add(self._decoder.decode(block), self._times(begin, block))

    def was_rotated(self) -> bool:
        """Whether another file has the name now."""
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def close(self) -> None:
        self._file.close()
        if self._index:
            self._index.close()

    def _times(self, begin: int, block: bytes) -> list[tuple[int, datetime]]:
        times: list[tuple[int, datetime]] = []
        with suppress(OSError, ValueError, OverflowError):
            if self._index is None:
                index = self._path.with_name(self._path.name.replace(OUTPUT_LOG, LOG_TIMES)).open("rb")
                if self.was_rotated():
                    index.close()
                    return []
                self._index = index
            times.extend((line, datetime.fromtimestamp(at, UTC)) for line, at in line_times(self._index, begin, block))
        return times


def _since(lines: Generator[PrintedLine], since: datetime | None) -> Generator[PrintedLine]:
    for line in lines:
        if since is None or line.time is None or line.time >= since:
            yield line
