"""Tests of reading logs that agents have copied: others may write there, and a reader may serve others."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.client.logs.copies import CopiedLog
from perdure.client.logs.lines import PrintedLine
from tests.support.processor_time import ends_within

BEGIN = 1_764_000_000


def put(folder: Path, number: int, content: str, times: list[tuple[int, float]]) -> None:
    (folder / f"part-{number:06}.log").write_text(content)
    (folder / f"part-{number:06}.times").write_text(json.dumps(times))


def read(folder: Path, tail: int | None = None) -> list[PrintedLine]:
    async def lines() -> list[PrintedLine]:
        log = CopiedLog(f"file://{folder}", rank=0, incarnation=1)
        return [line async for line in log.old_lines(tail, None)]

    return asyncio.run(lines())


@pytest.mark.parametrize("seed", range(10))
def test_each_line_has_the_newest_time_before_it_and_a_tail_is_the_end_of_all_lines(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    expected: list[PrintedLine] = []
    for part in (1, 2):
        lines = ["x" * chosen.choice((0, 3, 40_000)) for _ in range(30)]
        starts = sorted(chosen.sample(range(30), 5))
        put(
            tmp_path,
            part,
            "".join(f"{line}\n" for line in lines),
            [(line, BEGIN + 100 * part + line) for line in starts],
        )
        for number, line in enumerate(lines):
            known = max((start for start in starts if start <= number), default=None)
            time = None if known is None else datetime.fromtimestamp(BEGIN + 100 * part + known, UTC)
            expected.append(PrintedLine(line, time))
    found = read(tmp_path)
    assert [line.time for line in found] == [line.time for line in expected]
    assert [len(line.text) > 100 for line in found] == [len(line.text) > 100 for line in expected]
    for tail in (0, 1, 7, 29, 30, 31, 60, 100):
        assert read(tmp_path, tail) == found[len(found) - min(tail, len(found)) :]


def test_the_last_lines_of_millions_take_little_time(tmp_path: Path) -> None:
    put(tmp_path, 1, "ab\n" * 3_000_000, [(0, BEGIN)])
    assert ends_within(2, lambda: read(tmp_path, 500))


def test_a_reader_of_millions_of_lines_gives_others_a_turn(tmp_path: Path) -> None:
    put(tmp_path, 1, "\n" * 200_000, [])

    async def turns() -> int:
        found = 0
        log = CopiedLog(f"file://{tmp_path}", rank=0, incarnation=1)

        async def all_lines() -> None:
            async for _ in log.old_lines(None, datetime.now(UTC)):
                pass

        reading = asyncio.create_task(all_lines())
        while not reading.done():
            await asyncio.sleep(0)
            found += 1
        return found

    assert asyncio.run(turns()) > 5
