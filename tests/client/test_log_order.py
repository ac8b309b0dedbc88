"""Tests of logs of several nodes as one: by time, each log in its own order."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import AsyncGenerator, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.agent.log_reader import read_log
from perdure.client.logs.agents import AgentLog
from perdure.client.logs.copies import CopiedLog
from perdure.client.logs.files import FileLog
from perdure.client.logs.lines import Lines, LogLine, PrintedLine
from perdure.client.logs.order import merge_by_time
from perdure.client.logs.read import Selection, read_logs
from perdure.contract import LONGEST_LINE, JobPhase, JobStatus, LogChunk, NodeId, NodePhase, NodeView, ReadLog
from perdure_launcher.supervisor.capture import RotatingFile
from perdure_training.node_api.layout import output_log

START = datetime(2026, 1, 1, tzinfo=UTC)
STATUS = JobStatus(
    name="job",
    namespace="default",
    uid="0123abcd",
    phase=JobPhase.RUNNING,
    role="trainer",
    backend="kubernetes",
    generation=1,
    nodes=1,
    nodes_min=1,
    nodes_max=1,
    world_size=1,
    restarts=0,
    max_restarts=10,
    restart_window=timedelta(hours=1),
    started_at=START,
)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


async def log(node: int, times: Iterable[int | None]) -> AsyncGenerator[LogLine]:
    for number, time in enumerate(times):
        yield LogLine(
            role="worker", node=node, incarnation=1, text=str(number), time=None if time is None else at(time)
        )


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
    writer = RotatingFile(output_log(tmp_path), max_bytes=12, clock=lambda: now[0])
    log = FileLog(output_log(tmp_path))
    for piece in (b"one\ntwo\n", b"thr", b"ee\n"):
        writer.write(piece)
        now[0] += 10
    old = [PrintedLine("one", at(0)), PrintedLine("two", at(0)), PrintedLine("three", at(10))]
    assert [line async for line in log.old_lines(None, None)] == old
    for piece in (b"four\n", b"and"):
        writer.write(piece)
        now[0] += 10
    assert [line async for line in log.new_lines()] == [PrintedLine("four", at(30))]
    writer.close()
    assert log.last_line() == [PrintedLine("and", at(40))]
    again = FileLog(output_log(tmp_path))
    assert [line.text async for line in again.old_lines(None, at(10))] == ["three", "four"]
    again = FileLog(output_log(tmp_path))
    assert [line.text async for line in again.old_lines(2, None)] == ["three", "four"]


LONG = 20_000_000
PART = 500_000
SHOWN = LONGEST_LINE - 7
CUT = f"xxxxx\ufffd\ufffd{'x' * SHOWN}… ({LONG - 5 - SHOWN:,} more characters)"


def write_long_lines(path: Path) -> None:
    """A line of 20 MB, bytes that are no text, a progress bar of 20 MB, and a line that has not ended."""
    now = START.timestamp()
    writer = RotatingFile(path, max_bytes=1 << 27, clock=lambda: now)
    long = b"x" * LONG
    for piece in (b"before\n", long[:5], b"\xff\xc3" + long[5:] + b"\n", b"\xe2\x82\nafter \x1b[2J\n"):
        writer.write(piece)
    for percent in range(100):
        writer.write(b"\r%3d%% " % percent + b"#" * (LONG // 100 - 6))
    writer.write(b"\r100% done\r\n" + long)
    writer.close()


LINES = ["before", CUT, "\ufffd", "after \x1b[2J", "100% done"]
LAST = f"{'x' * LONGEST_LINE}… ({LONG - LONGEST_LINE:,} more characters)"


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Reading takes no more memory for a longer line, and so no more time for each of its pieces."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < LONG / 4, f"{peak:,} bytes for lines of {LONG:,}"


@pytest.mark.parametrize("tail", [None, 2])
async def test_long_lines_are_cut_and_no_other_line_is_lost(tmp_path: Path, tail: int | None) -> None:
    write_long_lines(output_log(tmp_path))
    log = FileLog(output_log(tmp_path))
    with bounded_memory():
        found = [line.text async for line in log.old_lines(tail, None)]
        last = [line.text for line in log.last_line()]
    assert (found, last) == (LINES[-tail if tail else 0 :], [LAST])


async def test_long_lines_are_cut_when_they_are_followed(tmp_path: Path) -> None:
    log = FileLog(output_log(tmp_path))
    assert [line.text async for line in log.old_lines(None, None)] == []
    write_long_lines(output_log(tmp_path))
    with bounded_memory():
        found = [line.text async for line in log.new_lines()]
        last = [line.text for line in log.last_line()]
    assert (found, last) == (LINES, [LAST])


@pytest.mark.parametrize("tail", [None, 0, 3])
async def test_long_lines_of_copies_are_cut(tmp_path: Path, tail: int | None) -> None:
    write_long_lines(tmp_path / "output.log")
    copies = tmp_path / "copies"
    copies.mkdir()
    content = (tmp_path / "output.log").read_bytes()
    for number, begin in enumerate(range(0, len(content), PART)):
        (copies / f"part-{number:06}.log").write_bytes(content[begin : begin + PART])
    with bounded_memory():
        found = [line.text async for line in CopiedLog(f"file://{copies}", rank=0, incarnation=1).old_lines(tail, None)]
    assert found == ([*LINES, LAST] if tail is None else [*LINES, LAST][len(LINES) + 1 - tail :])


async def test_a_character_is_shown_once_all_of_it_is_written(tmp_path: Path) -> None:
    path = output_log(tmp_path)
    path.parent.mkdir()
    path.write_bytes("ä\n€".encode()[:-1])
    log = FileLog(path)
    assert [line.text async for line in log.old_lines(None, None)] == ["ä"]
    assert [line.text async for line in log.new_lines()] == []
    path.write_bytes("ä\n€\n".encode())
    assert [line.text async for line in log.new_lines()] == ["€"]


async def test_of_long_lines_an_agent_sends_only_what_is_shown(tmp_path: Path) -> None:
    write_long_lines(output_log(tmp_path))
    pieces: list[LogChunk] = []

    async def ask(request: ReadLog) -> LogChunk:
        pieces.append(read_log(tmp_path, position=request.position, lines=request.lines, since=request.since))
        return pieces[-1]

    log = AgentLog(ask, NodeId(uid="0a1b2c3d", role="worker", rank=0, incarnation=1))
    with bounded_memory():
        found = [line.text async for line in log.old_lines(None, None)]
        last = [line.text for line in log.last_line()]
    assert (found, last) == (LINES, [LAST])
    assert sum(len(piece.text) for piece in pieces) < LONG / 4


async def test_the_logs_of_all_roles_are_one_and_each_line_names_its_role(tmp_path: Path):
    def look(role: str, *, second: float) -> tuple[JobStatus, tuple[NodeView, ...]]:
        path = output_log(tmp_path / role)
        with contextlib.closing(RotatingFile(path, max_bytes=100, clock=lambda: at(second).timestamp())) as writer:
            writer.write(f"from {role}\n".encode())
        node = NodeView(rank=0, incarnation=1, phase=NodePhase.READY, since=START, log_path=str(path))
        return STATUS.replace(role=role), (node,)

    async def ask(request: ReadLog) -> LogChunk:
        raise AssertionError("the files are here")

    async def looks() -> list[tuple[JobStatus, tuple[NodeView, ...]]]:
        return [look("trainer", second=2), look("ps", second=1)]

    lines = read_logs(looks, ask, Selection(), follow=False, tail=None, since=None)
    assert [(line.role, line.node, line.text) async for line in lines] == [
        ("ps", 0, "from ps"),
        ("trainer", 0, "from trainer"),
    ]


async def test_times_without_end_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "part-000000.log").write_text("a\nb\n")
    (tmp_path / "part-000000.times").write_text("[[0, 1.0]]")
    copy = CopiedLog(f"file://{tmp_path}", rank=0, incarnation=1)
    assert [line.time is not None async for line in copy.old_lines(None, None)] == [True, True]
    (tmp_path / "part-000000.times").write_text(f"[[0, 1.0]{', [0, 1.0]' * 200_000}]")
    assert [line async for line in copy.old_lines(None, None)] == [PrintedLine("a", None), PrintedLine("b", None)]
