from pathlib import Path

import pytest

from benchmarks.recovery.steps import Step, StepLog, find_world, parse_starts, parse_steps, passed_at


def world_steps(
    *, start: float, pids: dict[int, int], count: int, first_step: int = 1, world_size: int | None = None
) -> list[Step]:
    size = world_size or len(pids)
    return [
        Step(time=start + i * 0.05 + rank * 0.001, step=first_step + i, rank=rank, world_size=size, pid=pid)
        for i in range(count)
        for rank, pid in pids.items()
    ]


def test_a_line_being_written_is_left_for_later():
    steps = parse_steps("10.5 1 0 2 77\n10.6 2 0 2 7")
    assert steps == [Step(time=10.5, step=1, rank=0, world_size=2, pid=77)]


def test_the_world_starts_with_the_first_step_of_its_last_rank():
    steps = world_steps(start=100, pids={0: 7, 1: 8}, count=6, first_step=41)
    world = find_world(steps, world_size=2, after=99)
    assert world is not None
    assert world.time == 100.001
    assert world.pids == {0: 7, 1: 8}
    assert world.first_step == 41


def test_a_world_that_steps_and_dies_has_not_recovered():
    short = world_steps(start=100, pids={0: 7, 1: 8}, count=4)
    assert find_world(short, world_size=2, after=99) is None
    again = world_steps(start=110, pids={0: 17, 1: 18}, count=5)
    world = find_world(short + again, world_size=2, after=99)
    assert world is not None
    assert world.pids == {0: 17, 1: 18}


def test_processes_from_before_the_kill_do_not_count():
    old = world_steps(start=100, pids={0: 7, 1: 8}, count=20)
    assert find_world(old, world_size=2, after=100.2, without={7, 8}) is None


def test_one_rank_is_not_a_world_of_two_and_a_world_of_two_not_one_of_one():
    lonely = world_steps(start=100, pids={0: 7}, count=20, world_size=2)
    assert find_world(lonely, world_size=2, after=99) is None
    assert find_world(lonely, world_size=1, after=99) is None


def test_a_world_has_caught_up_when_its_last_rank_passes_the_old_step():
    steps = world_steps(start=110, pids={0: 17, 1: 18}, count=6, first_step=41)
    world = find_world(steps, world_size=2, after=99)
    assert world is not None
    assert passed_at(steps, world, step=43) == pytest.approx(110.151)
    assert passed_at(steps, world, step=46) is None


def test_the_log_is_followed_across_torn_lines(tmp_path: Path):
    log = StepLog(tmp_path)
    assert log.refresh() == []
    path = tmp_path / "steps.log"
    path.write_text("10.5 1 0 2 77\n10.6 2 0", encoding="utf-8")
    assert [step.step for step in log.refresh()] == [1]
    path.write_text("10.5 1 0 2 77\n10.6 2 0 2 77\n", encoding="utf-8")
    assert [step.step for step in log.refresh()] == [1, 2]


def test_starts_are_read():
    (start,) = parse_starts("77 1 10.0 12.5 12.6\n78 0 10.0")
    assert (start.pid, start.rank, start.imported) == (77, 1, 12.5)
