"""Lines of one node's log, with the times at which they were printed as far as these are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple


class PrintedLine(NamedTuple):
    """One line."""

    text: str
    time: datetime | None
    """None where the log has no index of its times."""


class Lines:
    """Puts the lines of a log together from its pieces."""

    def __init__(self) -> None:
        self._rest = ""
        self._rest_time: datetime | None = None

    def add(self, text: str, times: Iterable[tuple[int, datetime]]) -> Iterator[PrintedLine]:
        """Yields the lines that the next piece ends.

        Args:
            text: The piece.
            times: The numbers of lines in the piece, and when they and those that follow were printed.
        """
        texts = text.split("\n")
        known = _time_of_each(len(texts), times)
        if self._rest:
            texts[0], known[0] = self._rest + texts[0], self._rest_time
        self._rest, self._rest_time = texts[-1], known[-1]
        for one, time in zip(texts[:-1], known[:-1], strict=True):
            yield PrintedLine(one.rstrip("\r"), time)

    def rest(self) -> Sequence[PrintedLine]:
        """Returns the text after the last line break, if there is any; once."""
        rest, self._rest = self._rest, ""
        return [PrintedLine(rest.rstrip("\r"), self._rest_time)] if rest else []


def _time_of_each(count: int, times: Iterable[tuple[int, datetime]]) -> list[datetime | None]:
    starts = dict(times)
    found: list[datetime | None] = []
    for number in range(count):
        found.append(starts.get(number, found[-1] if found else None))
    return found
