"""Logs that agents have copied to `outputs.logs`, including those of nodes that are replaced or gone."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from typing import Any

from perdure.base.errors import LogsUnavailable
from perdure.client.logs.lines import Lines, PrintedLine
from perdure.client.storage import at_storage, open_folder
from perdure.contract.logs import COMPLETE, PART_TIMES

_LARGEST = 16 * 1024 * 1024
"""Bytes of a part, at most: several times what agents write."""
_LARGEST_TIMES = 1024 * 1024
"""The same for the times of a part's lines, which take 30 times their bytes of memory when they are read."""
_PIECE = 256 * 1024
"""Bytes that are read of a file at a time."""
_PART = re.compile(r"/part-(\d+)\.log$")
_AT_ONCE = 32 * 1024
"""Characters of a part that are taken apart without giving others a turn."""
_LEFT_OUT = "\n[perdure: what follows here is left out, as the archive keeps the beginning and the end of long logs]\n"
_CUT_OFF = "[perdure: the log may have continued: its node was lost before its agent could copy the end]"

_Times = Sequence[tuple[int, datetime]]
"""Numbers of lines, and when they and those that follow were printed."""


class CopiedLog:
    """The copied log of one incarnation, which does not grow."""

    def __init__(
        self, folder: str, *, rank: int, incarnation: int, in_archive: bool = False, within: str | None = None
    ) -> None:
        """Prepares reading; reads nothing yet.

        Args:
            folder: URL of the folder that holds the log's parts.
            rank: The node's rank.
            incarnation: The node's incarnation.
            in_archive: Whether an archive keeps it, so that agents have marked its end, and its middle may be left out.
            within: As for `open_folder`.
        """
        self._folder = folder
        self._within = within
        self._in_archive = in_archive
        self._node = f"{rank}.{incarnation}"

    async def old_lines(self, tail: int | None, since: datetime | None) -> AsyncGenerator[PrintedLine]:
        """Yields the copy, or its last lines. Lines without a time count as printed after `since`.

        Raises:
            LogsUnavailable: if it cannot be read.
        """
        kept = deque[PrintedLine](maxlen=tail)
        try:
            place = self._within or self._folder
            files, parts, is_complete = await at_storage(place, partial(self._parts, tail, since))
            async for line in _lines(place, files, parts, tail):
                if since is not None and line.time is not None and line.time < since:
                    continue
                if tail is None:
                    yield line
                else:
                    kept.append(line)
        except FileNotFoundError:
            raise LogsUnavailable(
                f"no log of node {self._node} is in {self._folder}",
                remedy="`perdure nodes` shows the newest incarnation of each node.",
            ) from None
        except Exception as error:
            # Each storage behind the URL raises errors of its own.
            raise LogsUnavailable(
                f"the log of node {self._node} cannot be read from {self._folder}: {error}",
                remedy="This machine needs the storage's client and credentials, as the nodes do.",
            ) from error
        if self._in_archive and not is_complete:
            kept.append(PrintedLine(_CUT_OFF, None))
        for line in kept:
            yield line

    async def new_lines(self) -> AsyncGenerator[PrintedLine]:
        """Yields nothing."""
        for line in ():
            yield line

    def last_line(self) -> Sequence[PrintedLine]:
        """Empty: reading all lines includes the last one."""
        return ()

    def _parts(self, tail: int | None, since: datetime | None) -> tuple[Any, Sequence[str], bool]:
        """Returns the storage, the parts that hold the requested lines, the oldest first, and whether the end is
        there."""
        files, root = open_folder(self._folder, within=self._within)
        names: list[str] = sorted(files.ls(root, detail=False))
        parts = [name for name in names if _PART.search(name)]
        is_complete = any(name.endswith(f"/{COMPLETE}") for name in names)
        if since is not None:
            parts = parts[_begin_since(files, parts, since) :]
        if tail is None:
            return files, parts, is_complete
        begin, ends = len(parts), 0
        while begin > 0 and ends <= tail:
            begin -= 1
            ends += _content(files, parts[begin]).count(b"\n")
        return files, parts[begin:], is_complete


def _begin_since(files: Any, parts: Sequence[str], since: datetime) -> int:
    """Returns the number of the last part that begins before that time; 0 where none is known to."""
    for number in range(len(parts) - 1, -1, -1):
        times = _times(files, parts[number])
        if times and times[0][1] < since:
            return number
    return 0


async def _lines(place: str, files: Any, parts: Sequence[str], tail: int | None) -> AsyncGenerator[PrintedLine]:
    """Yields the lines of parts at a place; of the first one not those that more than `tail` others follow."""
    lines, decoder = Lines(), codecs.getincrementaldecoder("utf-8")("replace")
    before = 0
    for part in parts:
        content, times = await at_storage(place, partial(_read, files, part, None if before else tail))
        number = _number(part)
        gap = _LEFT_OUT if before and number != before + 1 else ""
        before = number
        begin = gap.count("\n")
        text = gap + decoder.decode(content)
        for piece, known in _pieces(text, [(begin + line, moment) for line, moment in times]):
            for line in lines.add(piece, known):
                yield line
            # A part may have millions of lines, and this process may serve others.
            await asyncio.sleep(0)
    for line in lines.rest():
        yield line


def _pieces(text: str, times: _Times) -> Iterator[tuple[str, _Times]]:
    """Yields pieces of a text, each with the times of its lines, by their numbers in it."""
    at = begin = 0
    while at < len(text):
        piece = text[at : at + _AT_ONCE]
        end = begin + piece.count("\n")
        yield piece, _times_from(times, begin, end)
        at, begin = at + len(piece), end


def _times_from(times: _Times, begin: int, end: int) -> _Times:
    """The times of the lines from one number to another one, counted from the first; that one has the time of those
    before it where it has none of its own."""
    first = bisect_right(times, begin, key=itemgetter(0))
    known = [(0, times[first - 1][1])] if first else []
    return known + [
        (line - begin, moment) for line, moment in times[first : bisect_right(times, end, key=itemgetter(0))]
    ]


def _read(files: Any, part: str, tail: int | None) -> tuple[bytes, _Times]:
    """Returns a part and the times of its lines; of so many lines at its end, where that is given."""
    content, times = _content(files, part), _times(files, part)
    begin = 0 if tail is None else _begin_of_last(content, tail)
    skipped = content.count(b"\n", 0, begin)
    return content[begin:], _times_from(times, skipped, skipped + content.count(b"\n", begin)) if skipped else times


def _begin_of_last(content: bytes, lines: int) -> int:
    """Returns where the last lines begin."""
    at = len(content)
    for _ in range(lines + 1):
        at = content.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1


def _content(files: Any, path: str, most: int = _LARGEST) -> bytes:
    """Reads a file, unless it is larger than any that an agent has written: others can write there, too.

    Raises:
        ValueError: if it is.
        FileNotFoundError: if there is none.
    """
    size = files.size(path)
    with files.open(path, "rb") as file:
        # Room is made for what is read at once: not for the most. What it has grown by is read, too.
        content: bytes = file.read(min(size, most) + 1)
        while len(content) <= most and (piece := file.read(_PIECE)):
            content += piece
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes, which no agent has written")
    return content


def _times(files: Any, part: str) -> _Times:
    """Returns the times of a part's lines; empty where they are not known."""
    try:
        found = json.loads(_content(files, f"{part.removesuffix('.log')}.{PART_TIMES}", _LARGEST_TIMES))
        # In the order in which agents write them: others can write there, too.
        return sorted((int(line), datetime.fromtimestamp(moment, UTC)) for line, moment in found)
    except (FileNotFoundError, ValueError, TypeError, OverflowError, RecursionError):
        return ()


def _number(part: str) -> int:
    found = _PART.search(part)
    return int(found[1]) if found else 0
