"""Lines of one node's log, with the times at which they were printed as far as these are known.

A line may be of any size, as of a progress bar without line breaks, or of a tensor that is printed. Only its beginning
is kept, so that reading takes memory for one piece, and time in proportion to the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from perdure.base.words import count
from perdure.client.views import View
from perdure.contract import LONGEST_LINE, LogChunk


class LogLine(View):
    """One line of a node's output."""

    role: str
    node: int
    incarnation: int
    text: str
    time: datetime | None = None
    """When it was printed, by the node's clock and to 20 ms; None where that is not known."""


class PrintedLine(NamedTuple):
    """One line."""

    text: str
    time: datetime | None
    """None where the log has no index of its times."""


class Lines:
    """Puts the lines of a log together from its pieces."""

    def __init__(self) -> None:
        self._rest = ""
        """The beginning of the line that has not ended yet."""
        self._cut = 0
        """The number of its characters that follow and are left out."""
        self._rest_time: datetime | None = None

    def add(self, text: str, times: Iterable[tuple[int, datetime]]) -> Iterator[PrintedLine]:
        """Yields the lines that the next piece ends, cut to `LONGEST_LINE` characters.

        Args:
            text: The piece.
            times: The numbers of lines in the piece, and when they and those that follow were printed.
        """
        texts = text.split("\n")
        known = _time_of_each(len(texts), times)
        if self._rest:
            known[0] = self._rest_time
        for one, time in zip(texts[:-1], known[:-1], strict=True):
            self._extend(one)
            yield PrintedLine(self._take(), time)
        self._rest_time = known[-1]
        self._extend(texts[-1])

    def add_piece(self, chunk: LogChunk) -> Iterator[PrintedLine]:
        """Yields the lines that a piece of an agent's answer ends."""
        yield from self.add(chunk.text, ((one.line, one.at) for one in chunk.times))
        self._cut += chunk.left_out

    def rest(self) -> Sequence[PrintedLine]:
        """Returns the text after the last line break, if there is any; once."""
        return [PrintedLine(self._take(), self._rest_time)] if self._rest else []

    def _extend(self, text: str) -> None:
        """Adds to the line. Of a line that is too long, a terminal shows what follows the last carriage return."""
        if self._cut:
            visible = text.rstrip("\r").rfind("\r")
            if visible < 0:
                self._cut += len(text)
                return
            self._rest, self._cut, text = "", 0, text[visible + 1 :]
        self._rest += text
        if len(self._rest) > LONGEST_LINE:
            line = self._rest[self._rest.rstrip("\r").rfind("\r") + 1 :]
            self._rest, self._cut = line[:LONGEST_LINE], max(len(line) - LONGEST_LINE, 0)

    def _take(self) -> str:
        line, cut = self._rest.rstrip("\r"), self._cut
        self._rest, self._cut = "", 0
        return f"{line}… ({count(cut, 'more character')})" if cut else line


def _time_of_each(count: int, times: Iterable[tuple[int, datetime]]) -> list[datetime | None]:
    starts = dict(times)
    found: list[datetime | None] = []
    for number in range(count):
        found.append(starts.get(number, found[-1] if found else None))
    return found
