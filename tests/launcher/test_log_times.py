"""Tests of the index of a log's times: small, rotated with the log, and never a reason why output is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure_launcher.log_times import RESOLUTION, TimesWriter, line_times, offset_since
from perdure_launcher.supervisor.capture import RotatingFile


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def times(index: Path, begin: int, content: bytes) -> list[tuple[int, float]]:
    with index.open("rb") as file:
        return list(line_times(file, begin, content))


def test_each_line_has_the_time_of_its_beginning(tmp_path: Path) -> None:
    clock = Clock()
    log = RotatingFile(tmp_path / "output.log", max_bytes=1000, clock=clock)
    log.write(b"one\ntwo\nth")
    clock.now += 1
    log.write(b"ree\nfour\n")
    index = tmp_path / "output.times"
    content = (tmp_path / "output.log").read_bytes()
    assert times(index, 0, content) == [(0, 1000), (3, 1001)]
    # A piece that begins in the middle of a line, and one that an entry does not begin in.
    assert times(index, 5, content[5:]) == [(0, 1000), (2, 1001)]
    assert times(index, 12, content[12:]) == [(0, 1001)]
    with index.open("rb") as file:
        assert [offset_since(file, moment) for moment in (0, 1000, 1000.5, 1001, 1002)] == [0, 0, 10, 10, None]


def test_a_chatty_command_makes_no_large_index(tmp_path: Path) -> None:
    clock = Clock()
    log = RotatingFile(tmp_path / "output.log", max_bytes=1 << 20, clock=clock)
    for _ in range(1000):
        log.write(b"line\n")
        clock.now += RESOLUTION / 100
    assert (tmp_path / "output.times").stat().st_size <= 11 * 16


def test_a_clock_that_is_set_back_is_followed(tmp_path: Path) -> None:
    clock = Clock()
    writer = TimesWriter(tmp_path / "output.times", clock=clock)
    writer.note(0)
    clock.now -= 500
    writer.note(5)
    assert times(tmp_path / "output.times", 0, b"line\nline\n") == [(0, 1000), (1, 500)]


def test_the_index_is_rotated_with_its_log_also_if_one_is_missing(tmp_path: Path) -> None:
    clock = Clock()
    log = RotatingFile(tmp_path / "output.log", max_bytes=10, clock=clock)
    for number in range(12):
        log.write(b"line %04d\n" % number)
        clock.now += 1
        if number == 9:
            (tmp_path / "output.times").unlink()
    found = {
        part.name: times(part.with_name(part.name.replace("log", "times")), 0, part.read_bytes())
        for part in tmp_path.glob("output.log*")
        if part.with_name(part.name.replace("log", "times")).exists()
    }
    assert found == {
        "output.log": [(0, 1011)],
        "output.log.1": [(0, 1010)],
        "output.log.3": [(0, 1008)],
        "output.log.4": [(0, 1007)],
    }


def test_an_entry_that_was_not_written_whole_is_dropped(tmp_path: Path) -> None:
    clock = Clock()
    index = tmp_path / "output.times"
    TimesWriter(index, clock=clock).note(0)
    with index.open("ab") as file:
        file.write(b"half an")
    clock.now += 1
    TimesWriter(index, clock=clock).note(5)
    assert times(index, 0, b"line\nline\n") == [(0, 1000), (1, 1001)]


@pytest.mark.parametrize("name", ["missing/output.times", "."])
def test_an_index_that_cannot_be_written_is_left_out(tmp_path: Path, name: str) -> None:
    TimesWriter(tmp_path / name).note(0)


def test_a_piece_with_very_many_entries_has_a_thousand(tmp_path: Path) -> None:
    clock = Clock()
    writer = TimesWriter(tmp_path / "output.times", clock=clock)
    content = b"\n" * 5000
    for offset in range(5000):
        writer.note(offset)
        clock.now += 1
    found = times(tmp_path / "output.times", 0, content)
    assert len(found) == 1000
    assert all(moment == 1000 + line for line, moment in found)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_an_index(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    index = tmp_path_factory.mktemp("index") / "output.times"
    index.write_bytes(content)
    lines = [line for line, _ in times(index, 3, b"one\ntwo\nthree\n")]
    assert lines == sorted(lines)
    assert all(0 <= line <= 3 for line in lines)
    with index.open("rb") as file:
        offset_since(file, 7.0)
