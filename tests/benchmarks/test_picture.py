"""Tests of the picture of steps under faults: lines where a system steps, gaps where it does not."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.picture.course import Fault, Point, Record, lines_of
from benchmarks.picture.drawing import draw
from benchmarks.recovery.steps import Step


def steps(pid: int, *times: float, first: int = 1, rank: int = 0) -> list[Step]:
    return [Step(1000 + time, first + number, rank, 2, pid) for number, time in enumerate(times)]


def test_each_process_of_the_first_rank_is_a_line() -> None:
    found = lines_of([*steps(7, 0, 1, 2), *steps(8, 1, rank=1), *steps(9, 5, 6, first=2)], since=1000, until=10)
    assert [[(point.at, point.step) for point in line] for line in found] == [
        [(0, 1), (1, 2), (2, 3)],
        [(5, 2), (6, 3)],
    ]


def test_steps_that_cannot_be_told_apart_are_one_point_and_the_last_one_stays() -> None:
    (line,) = lines_of(steps(7, *(number / 20 for number in range(41))), since=1000, until=10)
    assert line[0].step == 1
    assert line[-1].step == 41
    assert len(line) < 15


def test_what_is_outside_of_the_time_is_left_out() -> None:
    assert lines_of(steps(7, -1, 11), since=1000, until=10) == []


def test_the_picture_has_each_system_and_fault_and_shows_who_does_not_step() -> None:
    stepping = Record(lines=[[Point(at=0, step=0), Point(at=20, step=400)]], faults=[5])
    ended = Record(lines=[[Point(at=0, step=0), Point(at=5, step=90)]], faults=[5])
    drawn = draw(
        {"Perdure": stepping, "<peer>": ended, "third": Record(lines=[], faults=[])}, [Fault(at=5)], seconds=20
    )
    root = ElementTree.fromstring(drawn)
    words = [text.text for text in root.iter() if text.text and text.tag.endswith("text")]
    assert {"Perdure", "<peer>", "400 steps", "90 steps", "kill -9 of a rank"} <= set(words)
    dashes = [line for line in root.iter() if line.get("class", "").startswith("idle")]
    assert len(dashes) == 1
