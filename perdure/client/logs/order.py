"""Puts the lines of several nodes in the order in which they were printed."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.client.logs.lines import LogLine

_AT_ONCE = 32
"""The number of logs that are opened beside each other: an agent takes a tenth of a second to answer."""

_EARLIEST = datetime.min.replace(tzinfo=UTC)


async def merge_by_time(logs: Sequence[AsyncGenerator[LogLine]]) -> AsyncGenerator[LogLine]:
    """Yields the lines of all logs by their times, and lines without a time right after the one before.

    The lines of one log stay in their order, also if its clock was set back.
    """
    free = asyncio.Semaphore(_AT_ONCE)

    async def first(lines: AsyncGenerator[LogLine]) -> LogLine | None:
        async with free:
            return await anext(lines, None)

    firsts = await asyncio.gather(*map(first, logs))
    heap = [(_time(line, _EARLIEST), number, line) for number, line in enumerate(firsts) if line is not None]
    heapq.heapify(heap)
    while heap:
        time, number, line = heap[0]
        yield line
        following = await anext(logs[number], None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (_time(following, time), number, following))


def _time(line: LogLine, before: datetime) -> datetime:
    return max(line.time, before) if line.time else before
