"""Logs in files of this machine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class FileLog:
    """Reads one log from its last position, through rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    async def old_lines(self, tail: int | None) -> AsyncGenerator[str]:
        """Yields the existing lines, including those of rotated files."""
        lines: deque[str] = deque(maxlen=tail)
        for path in self._rotated_files():
            with suppress(FileNotFoundError):
                lines.extend(_text(line) for line in path.read_bytes().splitlines())
        lines.extend(self._new_lines())
        for line in lines:
            yield line

    async def new_lines(self) -> AsyncGenerator[str]:
        """Yields the lines added since the last call."""
        for line in self._new_lines():
            yield line

    def last_line(self) -> str:
        """The text after the last line break."""
        rest, self._rest = self._rest, b""
        return _text(rest)

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _new_lines(self) -> Generator[str]:
        while True:
            if self._file is None:
                try:
                    self._file = self._path.open("rb")
                except FileNotFoundError:
                    return
            while chunk := self._file.read(65536):
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                yield from (_text(line) for line in whole)
            if not self._was_rotated(self._file):
                return
            self._file.close()
            self._file = None

    def _was_rotated(self, file: BinaryIO) -> bool:
        try:
            return self._path.stat().st_ino != os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _rotated_files(self) -> list[Path]:
        numbered = [
            (int(path.suffix[1:]), path)
            for path in self._path.parent.glob(f"{self._path.name}.*")
            if path.suffix[1:].isdecimal()
        ]
        return [path for _, path in sorted(numbered, reverse=True)]


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
