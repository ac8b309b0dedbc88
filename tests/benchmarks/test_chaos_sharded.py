"""Tests that steps which sharded programs lose are found, and distinguished from those of which no copy was left."""

from __future__ import annotations

from pathlib import Path

from benchmarks.chaos.faults import Fault, Kind
from benchmarks.chaos.sharded import Course, Line, Lost, judge, parse, read


def kept(generation: int, steps: range, *, size: int, begin: float) -> list[Line]:
    """Each rank keeps a step a second."""
    return [
        Line(begin + number, step, rank, size, generation, f"at-{step}")
        for number, step in enumerate(steps)
        for rank in range(size)
    ]


def loads(generation: int, step: int, *, size: int, time: float, digest: str | None = None) -> list[Line]:
    return [Line(time, step, rank, size, generation, digest or f"at-{step}") for rank in range(size)]


def lost_node(node: int, time: float, *, kind: Kind = Kind.NODE, processes: int = 5) -> Fault:
    return Fault(kind=kind, job="job", nodes=(node,), time=time, processes=processes)


def course(step: int, *faults: Fault, digest: str | None = None) -> Course:
    """Three ranks keep steps 1 to 9, and the last rank alone step 10; then two continue with a step."""
    before = [*kept(1, range(1, 10), size=3, begin=100), Line(109, 10, 2, 3, 1, "at-10")]
    begun = [*loads(1, 0, size=3, time=99), *loads(2, step, size=2, time=120, digest=digest)]
    return judge([*before, *kept(2, range(step + 1, step + 3), size=2, begin=121)], begun, faults)


def test_a_world_that_continues_with_the_newest_whole_step_has_lost_nothing():
    assert course(9) == Course((3, 2), (), ())
    assert course(10) == Course((3, 2), (), ())


def test_an_older_step_is_lost_although_a_copy_was_left_unless_two_nodes_memory_was():
    assert course(7, lost_node(1, 110)).lost == (Lost(2, 2, had_copy=True),)
    assert course(0).steps_lost_with_copy == 9
    both = course(7, lost_node(1, 110), lost_node(2, 111))
    assert both.lost == (Lost(2, 2, had_copy=False),)
    assert both.steps_lost_with_copy == 0


def test_only_nodes_that_were_lost_meanwhile_count_and_one_that_is_lost_again_counts_once():
    others = [
        lost_node(2, 99.5),
        lost_node(2, 121),
        lost_node(1, 115),
        lost_node(2, 112, kind=Kind.RANK),
        lost_node(0, 113, processes=0),
    ]
    assert course(7, lost_node(1, 110), *others).steps_lost_with_copy == 2


def test_a_world_that_kept_nothing_is_compared_with_what_it_loaded():
    found = judge(
        kept(1, range(1, 10), size=2, begin=100),
        [*loads(1, 0, size=2, time=99), *loads(2, 4, size=3, time=120), *loads(3, 4, size=2, time=130)],
        [lost_node(0, 110), lost_node(1, 111)],
    )
    assert found.lost == (Lost(2, 5, had_copy=False),)
    assert found.worlds == (2, 3, 2)


def test_other_bits_than_were_saved_are_found():
    assert course(9, digest="others").other_bits == (2,)
    uneven = judge(
        kept(1, range(1, 4), size=2, begin=100),
        [*loads(1, 0, size=2, time=99), *loads(2, 3, size=1, time=120), *loads(2, 2, size=1, time=120)],
        [],
    )
    assert uneven.other_bits == (2,)


def test_what_programs_write_is_read_also_while_they_write(tmp_path: Path):
    assert read(tmp_path, []) == Course((), (), ())
    (tmp_path / "loads.log").write_text("1.5 None 0 1 1 abc\n2.5 3 0 1 2 abd\n")
    (tmp_path / "steps.log").write_text("2.0 3 0 1 1 abd\n2.1 4 0")
    assert read(tmp_path, []) == Course((1, 1), (), ())
    assert parse("1.5 None 0 1 1 abc\n") == [Line(1.5, 0, 0, 1, 1, "abc")]
