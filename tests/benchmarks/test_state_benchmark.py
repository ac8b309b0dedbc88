"""The counts of the benchmark of split states: bytes that were lacked, steps made again, and the last line."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.recovery.steps import Step, WorldStart
from benchmarks.state.lacking import WIDTH, bytes_lacked, layers_of, rows_of, shapes
from benchmarks.state.records import (
    Change,
    Moved,
    TrialRecord,
    Way,
    change,
    differing,
    newest_common_step,
    parse_losses,
)
from benchmarks.state.report import bytes_ratio, closing, table


@pytest.mark.parametrize(
    ("rows", "parts"),
    [(1024, [342, 342, 340]), (7, [2, 2, 2, 1]), (2, [1, 1, 0]), (9, [3, 3, 3, 0]), (5, [2, 2, 1, 0])],
)
def test_rows_are_those_that_fsdp2_gives_a_rank(rows: int, parts: list[int]):
    """As `torch.chunk` does: the last ranks may have fewer, or none."""
    found = [rows_of(rank, world_size=len(parts), rows=rows) for rank in range(len(parts))]
    assert [len(part) for part in found] == parts
    assert [row for part in found for row in part] == list(range(rows))


def test_a_node_lacks_the_rows_that_neither_its_own_part_nor_its_copy_has():
    # Of three ranks node 1 is lost: node 0 has its own part and the copy of rank 2, node 2 its own and that of rank 1.
    lacked = [
        bytes_lacked([(12, 10)], rank=rank, world_size=2, former=3, here=here)
        for rank, here in enumerate(([0, 2], [2, 1]))
    ]
    assert lacked == [20, 0]
    assert bytes_lacked([(12, 10)], rank=1, world_size=3, former=2, here=[]) == 40


def test_a_models_shapes_have_all_bytes_of_its_state():
    layers = layers_of(64)
    assert sum(rows * row for rows, row in shapes(layers)) == layers * 12 * (WIDTH * WIDTH + 2 * WIDTH)
    assert abs(layers * 12 * WIDTH**2 - 64e6) < 12 * WIDTH**2


def made(pids: list[int], steps: range, *, begin: float) -> list[Step]:
    """The ranks' steps, one a second."""
    return [
        Step(begin + number, step, rank, len(pids), pid)
        for number, step in enumerate(steps)
        for rank, pid in enumerate(pids)
    ]


FORMER = WorldStart(0.0, {0: 10, 1: 11, 2: 12}, 1)


def load(rank: int, pid: int, **more: Any) -> dict[str, Any]:
    here = [[8, 2, 3, 0], [9, 2, 3, 0], [9, 2, 3, 2], [9, 1, 2, 1]]
    return {"rank": rank, "pid": pid, "world_size": 2, "here": here, "loaded_step": 9, "received_bytes": 30} | more


def test_a_change_counts_from_the_kill_to_the_first_step_and_to_the_first_new_step():
    steps = [*made([10, 11, 12], range(1, 11), begin=0), *made([20, 21], range(10, 15), begin=20)]
    world = WorldStart(20.0, {0: 20, 1: 21}, 10)
    loads = [load(0, 20, source="peer"), load(1, 21, source="storage"), load(0, 10, source="peer")]
    found = change(steps, loads, former=FORMER, world=world, since=9.5, parameters=[(12, 10)])
    assert found is not None
    assert (found.former, found.size, found.again, found.new, found.lost) == (3, 2, 10.5, 11.5, 1)
    assert found.moved == (Moved(rank=0, lacked=20, received=30),)
    assert bytes_ratio(found) == 1.5
    # One that was not killed counts from its last step.
    planned = change(steps, loads, former=FORMER, world=world, since=None, parameters=[(12, 10)])
    assert planned is not None
    assert planned.again == 11


def test_a_world_that_has_not_passed_the_one_before_is_not_judged_yet():
    steps = [*made([10, 11, 12], range(1, 11), begin=0), *made([20, 21], range(6, 11), begin=20)]
    world = WorldStart(20.0, {0: 20, 1: 21}, 6)
    assert change(steps, [], former=FORMER, world=world, since=9.5, parameters=[]) is None


def test_a_step_counts_once_all_ranks_have_made_it():
    steps = [*made([10, 11], range(1, 4), begin=0), Step(5.0, 4, 0, 2, 10)]
    assert newest_common_step(steps, {10, 11}) == 3
    assert newest_common_step(steps, {10, 11, 12}) == 0


def test_losses_differ_where_one_is_missing_has_other_bits_or_was_made_twice_with_other_bits():
    unbroken = parse_losses("1 0 2 0x1p0\n2 0 2 0x1p1\n3 0 2 0x1p2\n4 0 2 0x1p3\n")
    mine = parse_losses("1 0 2 0x1p0\n1 0 2 0x1p0\n2 0 2 0x1p2\n3 0 2 0x1p2\n3 0 2 0x1p4\n9 0 2 0x1p4\n")
    assert differing(mine, unbroken) == [(2, 0, 2), (3, 0, 2), (4, 0, 2)]
    assert differing(unbroken, unbroken) == []


def record(way: Way, new: float, *, megabytes: float = 64, lost: int = 0, received: int = 100) -> TrialRecord:
    moved = (Moved(rank=0, lacked=80, received=received), Moved(rank=1, lacked=0, received=5)) * (way is Way.MEMORY)
    shrunk = Change(former=3, size=2, again=new, new=new, lost=lost, first_step=5, moved=moved)
    return TrialRecord(way=way, nodes=3, megabytes=megabytes, number=1, shrunk=shrunk, grown=shrunk, bitwise=True)


def test_the_last_line_has_the_worst_job_and_is_empty_where_a_trial_failed():
    records = [
        record(Way.MEMORY, 2.0),
        record(Way.STORAGE, 8.0),
        record(Way.MEMORY, 3.0, megabytes=512, received=96),
        record(Way.STORAGE, 6.0, megabytes=512, lost=5),
    ]
    assert closing(records) == {
        "reshard_s": 3.0,
        "reshard_vs_storage": 0.5,
        "bytes_ratio": 1.25,
        "lost_steps": 0,
        "bitwise": True,
    }
    assert table(records).row_count == 4
    failed = TrialRecord(way=Way.MEMORY, nodes=4, megabytes=64, number=1, error="no world of 4 stepped")
    assert set(closing([*records, failed]).values()) == {None}
    assert closing(records[:1])["reshard_vs_storage"] is None
