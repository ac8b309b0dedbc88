"""Tests of logs of several nodes as one: by time, each log in its own order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from perdure.client.logs.files import FileLog
from perdure.client.logs.lines import Lines, PrintedLine
from perdure.client.logs.order import merge_by_time
from perdure.client.logs.read import LogLine
from perdure_launcher.supervisor.capture import RotatingFile

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


async def log(node: int, times: Iterable[int | None]) -> AsyncGenerator[LogLine]:
    for number, time in enumerate(times):
        yield LogLine(node=node, incarnation=1, text=str(number), time=None if time is None else at(time))


async def order(*logs: Iterable[int | None]) -> list[str]:
    return [
        f"{line.node}.{line.text}"
        async for line in merge_by_time([log(node, times) for node, times in enumerate(logs)])
    ]


async def test_lines_are_ordered_by_time() -> None:
    assert await order([1, 4, 6], [2, 3, 5], []) == ["0.0", "1.0", "1.1", "0.1", "1.2", "0.2"]


async def test_a_line_without_a_time_follows_the_one_before() -> None:
    assert await order([1, None, 6], [2, 3]) == ["0.0", "0.1", "1.0", "1.1", "0.2"]
    assert await order([None, None], [1]) == ["0.0", "0.1", "1.0"]


@given(st.lists(st.lists(st.none() | st.integers(0, 20), max_size=8), max_size=4))
async def test_no_line_is_lost_and_each_log_stays_in_order(logs: list[list[int | None]]) -> None:
    lines = await order(*logs)
    assert sorted(lines) == sorted(f"{node}.{number}" for node, log in enumerate(logs) for number in range(len(log)))
    for node in range(len(logs)):
        own = [int(line.partition(".")[2]) for line in lines if line.startswith(f"{node}.")]
        assert own == sorted(own)


@given(text=st.text(alphabet="ab\n\r", max_size=40), cuts=st.lists(st.integers(0, 40)))
def test_lines_are_whole_however_the_pieces_are_cut(text: str, cuts: list[int]) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    lines = Lines()
    found = [line.text for begin, end in pairwise(bounds) for line in lines.add(text[begin:end], [])]
    found += [line.text for line in lines.rest()]
    expected = text.split("\n")
    assert found == [line.rstrip("\r") for line in (expected if expected[-1] else expected[:-1])]


async def test_lines_in_files_have_the_times_of_their_beginnings(tmp_path: Path) -> None:
    now = [START.timestamp()]
    writer = RotatingFile(tmp_path / "output.log", max_bytes=12, clock=lambda: now[0])
    log = FileLog(tmp_path / "output.log")
    for piece in (b"one\ntwo\n", b"thr", b"ee\n"):
        writer.write(piece)
        now[0] += 10
    old = [PrintedLine("one", at(0)), PrintedLine("two", at(0)), PrintedLine("three", at(10))]
    assert [line async for line in log.old_lines(None, None)] == old
    for piece in (b"four\n", b"and"):
        writer.write(piece)
        now[0] += 10
    assert [line async for line in log.new_lines()] == [PrintedLine("four", at(30))]
    assert log.last_line() == [PrintedLine("and", at(40))]
    log.close()
    again = FileLog(tmp_path / "output.log")
    assert [line.text async for line in again.old_lines(None, at(10))] == ["three", "four"]
    again.close()
    again = FileLog(tmp_path / "output.log")
    assert [line.text async for line in again.old_lines(2, None)] == ["three", "four"]
    again.close()


async def test_a_line_of_10_mb_and_bytes_that_are_no_text_lose_no_other_line(tmp_path: Path) -> None:
    now = START.timestamp()
    writer = RotatingFile(tmp_path / "output.log", max_bytes=1 << 24, clock=lambda: now)
    long = b"x" * 10_000_000
    for piece in (b"before\n", long[:5], b"\xff\xc3" + long[5:] + b"\n", b"\xe2\x82\nafter \x1b[2J\n"):
        writer.write(piece)
    log = FileLog(tmp_path / "output.log")
    found = [line.text async for line in log.old_lines(None, None)]
    log.close()
    assert found == ["before", "xxxxx\ufffd\ufffd" + "x" * 9_999_995, "\ufffd", "after \x1b[2J"]
