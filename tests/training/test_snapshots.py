"""Snapshots as files: torn, damaged and missing ones, slots that are used again, and the step that a world loads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from perdure_training.checkpoint.slots import Slots
from perdure_training.checkpoint.verification import fingerprint, is_intact
from perdure_training.checkpoint.world import Completeness
from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.snapshots.agreement import TRUSTED_RESTORES, Holding, decide
from perdure_training.snapshots.arena import PAGE, Arena, Header, Mapping, NoRoom, Slot
from tests.training.warm_torch import run_with_torch

HEADER = Header(step=7, rank=0, world_size=2, generation=1, replicated=False, index_at=0, size=0, checksum=0)


def write(slot: Slot, content: bytes, **changes: Any) -> None:
    room = slot.begin(len(content))
    room[:] = content
    slot.finish(replace(HEADER, size=len(content), checksum=fingerprint(room), **changes))


@pytest.mark.usefixtures("ranks")
def test_a_snapshot_is_read_back_by_another_process(tmp_path: Path):
    write(Arena(tmp_path).slot(0, 1), b"state" * 1000)
    program = (
        "import sys; from pathlib import Path; from perdure_training.snapshots.arena import *\n"
        "from perdure_training.checkpoint.verification import is_intact\n"
        "[(slot, header)] = Arena(Path(sys.argv[1])).snapshots()\n"
        "assert is_intact(slot, header); print(header.step, bytes(slot.read()) == b'state' * 1000)"
    )
    [answer] = run_with_torch(["-c", program, str(tmp_path)], environments=[os.environ], folder=tmp_path)
    assert answer.stdout.split() == ["7", "True"], answer.stderr


def test_a_mapping_is_still_there_when_its_end_is_announced(tmp_path: Path):
    slot = Arena(tmp_path).slot(0, 0)
    room = slot.begin(10)
    room[:] = b"still here"
    mapping, seen = room.obj, list[bytes]()
    assert isinstance(mapping, Mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    mapping.before_end = lambda: seen.append(ctypes.string_at(address + PAGE, 10))
    del mapping
    slot.begin(10)
    slot.begin(PAGE * 10)
    assert seen == []
    del room
    assert seen == [b"still here"]


def test_a_slot_has_no_snapshot_from_the_first_byte_that_is_written_to_the_last(tmp_path: Path):
    slot = Arena(tmp_path).slot(0, 0)
    write(slot, b"older", step=6)
    room = slot.begin(5)
    assert slot.header() is None
    room[:] = b"newer"
    assert slot.header() is None
    slot.finish(replace(HEADER, size=5, checksum=fingerprint(room)))
    assert slot.header() is not None


@pytest.mark.parametrize("slot", [0, 1])
def test_a_process_that_is_killed_while_it_saves_leaves_the_snapshot_before(tmp_path: Path, slot: int):
    write(Arena(tmp_path).slot(0, 0), b"older" * 1000, step=6)
    write(Arena(tmp_path).slot(0, 1), b"later" * 1000, step=7)
    program = (
        "import sys, time; from pathlib import Path; from perdure_training.snapshots.arena import *\n"
        f"room = Arena(Path(sys.argv[1])).slot(0, {slot}).begin(5000); room[:2500] = b'x' * 2500\n"
        "print('half', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.kill()
    [(left, header)] = Arena(tmp_path).snapshots()
    assert header.step == (7 if slot == 0 else 6)
    assert is_intact(left, header)


@given(cut=st.integers(0, PAGE + 99))
def test_a_file_that_ends_early_is_no_snapshot(tmp_path_factory: pytest.TempPathFactory, cut: int):
    slot = Arena(tmp_path_factory.mktemp("arena")).slot(0, 0)
    write(slot, bytes(100))
    os.truncate(slot.path, cut)
    assert slot.header() is None


@given(at=st.integers(0, PAGE + 99), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int):
    slot = Arena(tmp_path_factory.mktemp("arena")).slot(0, 0)
    write(slot, bytes(range(100)))
    written = slot.header()
    content = bytearray(slot.path.read_bytes())
    content[at] ^= 1 << bit
    slot.path.write_bytes(content)
    header = slot.header()
    # What follows the header's text on its page means nothing.
    assert header is None or not is_intact(slot, header) or (header == written and at < PAGE)


@given(data=st.data(), blocks=st.sampled_from([0, 1, 2, 8, 9]), rest=st.integers(0, 70))
def test_a_change_of_any_bytes_that_are_close_to_each_other_is_found(data: st.DataObject, blocks: int, rest: int):
    size = blocks * (1 << 18) + rest + 1
    content = memoryview(bytearray(size))
    before = fingerprint(content)
    at = data.draw(st.integers(0, size - 1))
    # Two words that change by opposite amounts, as two flips of the same bit line do.
    content[at] ^= 128
    other = min(size - 1, at + 8 * data.draw(st.integers(1, 2047)))
    content[other] ^= 128 if other != at else 1
    assert fingerprint(content) != before


WORD, ROW, BLOCK = 8, 1 << 14, 1 << 18
"""Of the checksum."""


@given(data=st.data(), bit=st.integers(0, 63))
def test_opposite_changes_of_words_at_any_distance_are_found(data: st.DataObject, bit: int):
    """A checksum of one sum for each column, or of one for each run, does not see them."""
    content = bytearray(os.urandom(2 * BLOCK))
    words = memoryview(content).cast("Q")
    distance = data.draw(st.sampled_from([1, 255, 256, ROW // WORD, 3 * ROW // WORD, BLOCK // WORD]))
    at = data.draw(st.integers(0, len(words) - 1 - distance))
    words[at] |= 1 << bit
    words[at + distance] &= ~(1 << bit)
    before = fingerprint(memoryview(content))
    words[at] ^= 1 << bit
    words[at + distance] ^= 1 << bit
    assert fingerprint(memoryview(content)) != before


@given(data=st.data(), size=st.sampled_from([WORD, 256 * WORD, 4096, ROW, BLOCK]))
def test_pieces_that_change_places_are_found(data: st.DataObject, size: int):
    content = bytearray(os.urandom(5 * BLOCK))
    before = fingerprint(memoryview(content))
    first = size * data.draw(st.integers(0, len(content) // size - 2))
    second = size * data.draw(st.integers(first // size + 1, len(content) // size - 1))
    one, other = content[first : first + size], content[second : second + size]
    content[first : first + size], content[second : second + size] = other, one
    assert fingerprint(memoryview(content)) != before


def test_a_snapshot_of_an_older_format_is_none(tmp_path: Path):
    slot = Arena(tmp_path).slot(0, 0)
    write(slot, b"state")
    content = slot.path.read_bytes()
    slot.path.write_bytes(b"PDSNAP02" + content[8:])
    assert slot.header() is None


def test_what_does_not_fit_is_refused_with_the_size(tmp_path: Path):
    slot = Arena(tmp_path).slot(0, 0)
    with pytest.raises(NoRoom, match=r"1,152,921,504,606,846,976 bytes do not fit"):
        slot.begin(1 << 60)
    assert slot.header() is None
    assert slot.path.stat().st_size == 0


def test_other_files_in_the_folder_are_no_snapshots(tmp_path: Path):
    arena = Arena(tmp_path)
    (tmp_path / "rank-0.0").write_bytes(b"x" * 5000)
    (tmp_path / "owner").touch()
    # A snapshot under the name of another rank.
    write(arena.slot(1, 0), b"state", rank=2)
    assert list(arena.snapshots()) == []


@given(st.data())
def test_ranks_that_run_apart_always_have_a_step_in_common(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """A rank may be killed while it writes, and be any number of steps ahead."""
    arena = Arena(tmp_path_factory.mktemp("arena"))
    ranks = range(data.draw(st.integers(1, 3)))
    saved: dict[int, int] = {}
    at = dict.fromkeys(ranks, 0)
    slots = {
        rank: Slots(arena, rank, is_complete=lambda step: saved.get(step, 0) == len(ranks), clock=lambda: 0.0)
        for rank in ranks
    }

    def held(rank: int) -> set[int]:
        return {header.step for slot, header in arena.snapshots() if header.rank == rank}

    for rank in data.draw(st.lists(st.sampled_from(ranks), max_size=30)):
        at[rank] += 1
        slot = slots[rank].choose()
        if slot is None:
            continue
        slot.begin(0)
        complete = len(ranks) in saved.values()
        assert not complete or set.intersection(*map(held, ranks)), "a kill now would lose every common step"
        slot.finish(replace(HEADER, step=at[rank], rank=rank))
        slots[rank].stage(slot, at[rank])
        slots[rank].finish(slot)
        saved[at[rank]] = saved.get(at[rank], 0) + 1


def test_steps_that_no_other_rank_saves_are_given_up_after_a_while(tmp_path: Path):
    now = 0.0
    slots = Slots(Arena(tmp_path), 0, is_complete=lambda step: step == 1, clock=lambda: now)
    for step in (1, 2, 3):
        slot = slots.choose()
        assert slot is not None
        slots.stage(slot, step)
        slots.finish(slot)
    assert slots.choose() is None
    now = 11.0
    given_up = slots.choose()
    assert given_up is not None
    slots.stage(given_up, 14)
    slots.finish(given_up)
    assert slots.choose() is None


def test_a_step_that_one_rank_has_given_up_costs_no_other_rank_the_one_before(tmp_path: Path):
    """As where copies take longer than the patience of a rank whose own are there."""
    now, arena, store = 0.0, Arena(tmp_path), HashStore()
    counts = [Completeness(store, 2) for _ in range(2)]
    first, second = (
        Slots(arena, rank, is_complete=one.is_complete, give_up=one.give_up, clock=lambda: now)
        for rank, one in enumerate(counts)
    )

    def stage(slots: Slots, step: int) -> Slot | None:
        if (slot := slots.choose()) is not None:
            slots.stage(slot, step)
        return slot

    def finish(slots: Slots, slot: Slot | None, step: int) -> None:
        assert slot is not None
        slots.finish(slot)
        counts[0 if slots is first else 1].add(step, copied=True)

    for step in (1, 2, 3):
        finish(first, stage(first, step), step)
    finish(second, stage(second, 1), 1)
    copied = stage(second, 2)
    assert stage(second, 3) is not None
    assert stage(first, 4) is None
    now = 11.0
    given_up = stage(first, 5)
    assert given_up is not None
    finish(second, copied, 2)
    assert not counts[1].is_complete(2)
    assert not counts[1].is_settled(2)
    assert stage(second, 5) is None, "step 1 is the only one that both have"


def test_a_step_that_all_ranks_have_by_now_is_not_given_up(tmp_path: Path):
    first, second = (Completeness(store, 2) for store in [HashStore()] * 2)
    for one in (first, second):
        one.add(5, copied=True)
    assert not first.give_up(5)
    assert second.is_complete(5)


def test_a_slot_is_not_written_while_its_snapshot_is_made_valid(tmp_path: Path):
    now = 0.0
    slots = Slots(Arena(tmp_path), 0, is_complete=lambda step: True, clock=lambda: now)
    staged: list[Slot] = []
    for step in (1, 2, 3):
        slot = slots.choose()
        assert slot is not None
        slots.stage(slot, step)
        staged.append(slot)
    assert slots.choose() is None
    now = 60.0
    assert slots.choose() is None
    slots.finish(staged[0])
    assert slots.choose() is staged[0]


HELD = Holding(rank=0, step=0, generation=1, world_size=2, replicated=False, size=10, restores=0)


def held(*steps: int, **changes: Any) -> list[Holding]:
    return [replace(HELD, step=step, **changes) for step in steps]


def test_the_newest_step_that_all_ranks_have_is_loaded():
    decision = decide({0: held(5, 6, 7), 1: held(5, 6, rank=1)}, 2)
    assert (decision.step, decision.sources) == (6, {})


def test_a_rank_that_moved_takes_its_snapshot_from_the_node_that_has_it():
    decision = decide({0: held(6) + held(6, rank=1), 1: []}, 2)
    assert (decision.step, decision.sources) == (6, {1: 0})


def test_a_replicated_state_replaces_that_of_a_lost_node_in_a_world_of_any_size():
    survivors = {0: held(6, 7, replicated=True), 2: held(6, rank=3, replicated=True)}
    assert decide(survivors, 3).step == 7
    assert decide(survivors, 3).sources == {1: 0, 2: 0}
    assert decide({0: held(7, rank=1, replicated=True)}, 1).sources == {}


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_world_of_another_size_splits_anew_what_all_ranks_of_the_former_one_have_left(world_size: int):
    decision = decide({0: held(7), 1: held(7, rank=1)}, world_size)
    assert (decision.step, decision.former, decision.holders) == (7, 2, {0: 0, 1: 1})
    assert decision.sources == {}
    assert decide({0: held(6, 7), 1: held(6, rank=1)}, world_size).step == 6, "of step 7 one rank's part is missing"


def test_a_step_of_this_worlds_size_is_loaded_as_it_is_if_it_is_as_new_as_that_of_a_former_world():
    former = held(7), held(7, rank=1)
    own = held(7, world_size=1, generation=2)
    assert decide({0: [*former[0], *former[1], *own]}, 1).former is None
    newer = [*held(8), *held(8, rank=1)]
    assert decide({0: [*newer, *own]}, 1).step == 8


def test_the_parts_of_a_former_world_are_given_by_as_many_ranks_as_have_them():
    everywhere = [one for rank in range(4) for one in held(7, rank=rank, world_size=4)]
    holders = decide({0: everywhere, 1: everywhere, 2: held(7, rank=3, world_size=4)}, 3).holders
    assert sorted(holders) == [0, 1, 2, 3]
    assert sorted(holders.values()) in ([0, 0, 1, 2], [0, 1, 1, 2])


def test_a_state_that_was_split_anew_and_fails_after_each_load_is_distrusted():
    loaded_often = held(7, restores=TRUSTED_RESTORES) + held(7, rank=1)
    decision = decide({0: [*loaded_often, *held(6), *held(6, rank=1)]}, 1)
    assert (decision.step, decision.distrusted) == (6, [7])


def test_a_rank_without_room_for_anothers_snapshot_makes_the_world_load_an_older_step():
    survivors = {0: held(6, 7, replicated=True), 1: held(6, rank=1, replicated=True)}
    assert decide(survivors, 2).sources == {1: 0}
    assert decide(survivors, 2, full=[0]).step == 7, "only a rank that lacks a snapshot needs room"
    assert decide(survivors, 2, full=[1]).step == 6
    assert decide({0: held(7, replicated=True), 1: []}, 2, full=[1]).step is None


def test_a_step_of_two_generations_is_two_states():
    before, after = held(6), held(6, rank=1, generation=2)
    assert decide({0: before, 1: after}, 2).step is None
    both = {0: before + held(6, generation=2, size=30), 1: after}
    assert (decide(both, 2).generation, decide(both, 2).size) == (2, 30)


def test_nothing_is_loaded_if_one_rank_has_nothing():
    decision = decide({0: held(7), 1: []}, 2)
    assert (decision.step, decision.reason) == (None, "no step is in memory for all ranks")
    assert decide({0: [], 1: []}, 2).reason == ""


def test_what_generations_so_far_have_saved_after_the_last_sound_step_is_not_loaded():
    unsound = UnsoundSteps(generation=1, after=6)
    spoiled = held(6, 7, world_size=1)
    assert decide({0: spoiled}, 1, unsound=unsound).step == 6
    assert decide({0: held(7, world_size=1)}, 1, unsound=unsound).step is None
    made_again = held(7, world_size=1, generation=2)
    assert decide({0: spoiled + made_again}, 1, unsound=unsound).generation == 2


def test_a_step_that_one_rank_reaches_twice_is_not_reached_by_two():
    store = HashStore()
    first, second = Completeness(store, 2), Completeness(store, 2)
    first.reach(5)
    first.reach(5)
    assert not second.is_reached(5)
    second.reach(5)
    assert first.is_reached(5)


def test_a_step_that_one_rank_saves_twice_is_no_step_of_two_ranks():
    store = HashStore()
    first, second = Completeness(store, 2), Completeness(store, 2)
    first.add(5, copied=True)
    first.add(5, copied=True)
    assert not first.is_complete(5)
    second.add(5, copied=True)
    assert first.is_complete(5)


def test_a_step_after_whose_load_the_world_failed_again_and_again_is_distrusted():
    suspect = held(7, restores=TRUSTED_RESTORES)
    decision = decide({0: held(6) + suspect}, 1)
    assert decision.step is None, "of a world of another size"
    decision = decide({0: held(6, world_size=1) + held(7, world_size=1, restores=TRUSTED_RESTORES)}, 1)
    assert decision.step == 6
    assert "newer steps failed again after each load: 7" in decision.reason
    assert decide({0: held(7, world_size=1, restores=TRUSTED_RESTORES)}, 1).step is None


@pytest.mark.parametrize(
    ("failures", "step"), [((), 7), ((1, 2, 3), 7), ((2, 3, 4), 6), ((2, 3, 4, 5), 6), ((2, 3), 7), (None, 6)]
)
def test_only_failures_of_the_script_that_follow_a_load_speak_against_it(failures: tuple[int, ...] | None, step: int):
    """Not a restart by a user, the loss of a machine, or the failure of the world that saved the state."""
    found = {0: held(6, world_size=1) + held(7, world_size=1, restores=TRUSTED_RESTORES)}
    assert decide(found, 1, script_failures=failures).step == step


def test_the_oldest_state_is_loaded_where_all_are_distrusted_and_there_is_nothing_else():
    found = {0: held(6, 7, world_size=1, restores=TRUSTED_RESTORES)}
    assert decide(found, 1).distrusted == [7, 6]
    last = decide(found, 1, last_resort=True)
    assert (last.step, last.distrusted) == (6, [])
    assert "there is no other state" in last.reason
    spoiled = decide(found, 1, last_resort=True, unsound=UnsoundSteps(generation=1, after=5))
    assert spoiled.step is None
