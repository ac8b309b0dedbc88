"""Logs in files of this machine, read as an agent reads its node's."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Generator, Sequence
from datetime import datetime
from pathlib import Path

from perdure.agent.log_reader import read_log
from perdure.client.logs.lines import Lines, PrintedLine
from perdure.contract import LogPosition


class FileLog:
    """Reads one node's log from its last position, through rotations."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet.

        Args:
            path: The newest part of the log, in the node's run directory.
        """
        self._run_dir = path.parents[1]
        self._position: LogPosition | None = None
        self._lines = Lines()

    async def old_lines(self, tail: int | None, since: datetime | None) -> AsyncGenerator[PrintedLine]:
        """Yields the existing lines, including those of rotated files."""
        lines = (line for line in self._read() if since is None or line.time is None or line.time >= since)
        for line in lines if tail is None else deque(lines, maxlen=tail):
            yield line

    async def new_lines(self) -> AsyncGenerator[PrintedLine]:
        """Yields the lines added since the last call."""
        for line in self._read():
            yield line

    def last_line(self) -> Sequence[PrintedLine]:
        """The text after the last line break, if there is any."""
        return self._lines.rest()

    def _read(self) -> Generator[PrintedLine]:
        at_end = False
        while not at_end:
            try:
                chunk = read_log(self._run_dir, position=self._position, whole_characters=True)
            except FileNotFoundError:
                # The log was rotated just now.
                continue
            self._position, at_end = chunk.position, chunk.at_end
            yield from self._lines.add_piece(chunk)
