"""Ranks that train on after a loss that is not a number leave in memory that to which the job goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure_training.checkpoint.slots import Slots
from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.snapshots.arena import Arena
from tests.training.played_nodes import Left, damage
from tests.training.played_worlds import PlayedWorld, played_site


def train(world: PlayedWorld, steps: int) -> None:
    """In lockstep, and each step is complete before the next."""
    for _ in range(steps):
        for rank in world.ranks:
            rank.step()
        for rank in world.ranks:
            while rank.finisher.waits:
                rank.finish()


@pytest.mark.parametrize(("replicated", "copies"), [(False, 0), (False, 1), (True, 0)])
@pytest.mark.parametrize("spoiled", [0, 1])
def test_ranks_whose_losses_are_numbers_overwrite_no_state_that_another_one_needs(
    tmp_path: Path, spoiled: int, replicated: bool, copies: int
):
    with played_site(tmp_path) as site:
        nodes = [site.node() for _ in range(2)]
        world = site.begin(nodes, ranks_of_node=1, replicated=replicated, copies=copies)

        train(world, 5)
        # The loss of step 6: that of step 5 has shown that the state of step 4 was sound.
        world.ranks[spoiled].is_spoiled = True
        unsound = UnsoundSteps(generation=1, after=4)
        train(world, 20)
        left = Left(nodes, unsound=unsound)
        assert left.newest(0) == 4
        assert left.newest(1) == (4 if copies or replicated else -1)
        again = site.begin(nodes, ranks_of_node=1, replicated=replicated, copies=copies, unsound=unsound)
        assert [rank.loaded for rank in again.ranks] == [4, 4]


def test_a_rank_that_was_to_receive_a_damaged_snapshot_loads_and_sends_that_of_its_node(tmp_path: Path):
    with played_site(tmp_path) as site:
        nodes = [site.node() for _ in range(3)]
        world = site.begin(nodes, ranks_of_node=1, replicated=True, copies=0)
        for _ in range(3):
            for rank in world.ranks:
                rank.step()
                rank.finish()
        for slot, _ in nodes[1].snapshots():
            damage(slot)
        again = site.begin([nodes[2], nodes[0], nodes[1]], ranks_of_node=1, replicated=True, copies=0)
        assert [rank.loaded for rank in again.ranks] == [3] * 3
        assert [rank.state["saved"].step for rank in again.ranks] == [3] * 3


def test_a_slot_is_written_only_as_long_as_no_rank_is_known_to_be_spoiled(tmp_path: Path):
    spoiled = False
    arena = Arena(tmp_path)
    slots = Slots(arena, 0, is_complete=lambda step: step <= 2, is_spoiled=lambda: spoiled)
    for step in (1, 2, 3):
        slot = slots.choose()
        assert slot is not None
        slots.stage(slot, step)
        slots.finish(slot)
    spoiled = True
    assert slots.choose() is None
    spoiled = False
    assert slots.choose() is not None


def test_a_slot_that_the_restored_state_still_reads_costs_no_step_that_may_be_the_newest_sound_one(tmp_path: Path):
    complete = 1
    slots = Slots(Arena(tmp_path), 0, is_complete=lambda step: step <= complete)
    for step in (1, 2, 3):
        slot = slots.choose()
        assert slot is not None
        if step == 1:
            slots.hold(slot)
        slots.stage(slot, step)
        slots.finish(slot)
    complete = 3
    assert slots.choose() is None, "the loss of step 4 may show that the state of step 3 is not sound"
    slots.release()
    assert slots.choose() is slots.free_slot(), "that of step 1"


@pytest.mark.parametrize("size", [2, 3])
def test_what_a_former_world_left_stays_until_the_state_that_was_loaded_is_known_to_be_sound(tmp_path: Path, size: int):
    with played_site(tmp_path) as site:
        nodes = [site.node() for _ in range(2)]
        world = site.begin(nodes, ranks_of_node=1, replicated=False, copies=0)

        train(world, 2)
        nodes = [*reversed(nodes), *(site.node() for _ in range(size - 2))]
        world = site.begin(nodes, ranks_of_node=1, replicated=False, copies=0)
        assert [rank.at for rank in world.ranks] == [2] * size
        world.ranks[0].is_spoiled = True
        train(world, 3)
        # The loss of step 3 is no number, so that the state of step 2 may not be sound.
        assert Left(nodes, unsound=UnsoundSteps(generation=2, after=1)).newest(0) == 1
        assert Left(nodes).newest(0) == 2


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reporting", [0, 1, None])
@pytest.mark.parametrize(("after", "sound"), [(348, 3), (248, 2)])
def test_states_of_a_script_that_saves_by_epochs_are_judged_by_the_steps_of_its_losses(
    tmp_path: Path, size: int, reporting: int | None, after: int, sound: int
):
    with played_site(tmp_path) as site:
        nodes = [site.node() for _ in range(2)]
        world = site.begin(nodes, ranks_of_node=1, replicated=False, copies=1)
        for rank in world.ranks:
            # Perhaps one rank alone reports losses.
            rank.losses = 100 if reporting in (None, rank.own.rank) else 0
        train(world, 4)
        # Where the loss of step 350 is none, the state of epoch 4 has it, and that of epoch 3 has those up to 300.
        unsound = UnsoundSteps(generation=1, after=after)
        nodes = [*nodes, *(site.node() for _ in range(size - 2))]
        world = site.begin(nodes, ranks_of_node=1, replicated=False, copies=1, unsound=unsound)
        assert [rank.loaded for rank in world.ranks] == [sound] * size
        [agreed] = [one.memory.agreed for one in world.ranks if one.own.rank == 0]
        assert agreed is not None
        # The newest that all ranks are known to have had is that of epoch 3, not missed where it is unsound.
        assert (agreed.decision.reported, agreed.complete) == (100 * sound, 3 if sound == 3 else None)

        # What was loaded is judged so in the next world, too, also where this one has split it anew.
        for rank in world.ranks:
            while rank.finisher.waits:
                rank.finish()
        unsound = UnsoundSteps(generation=2, after=100 * sound - 1)
        world = site.begin(nodes, ranks_of_node=1, replicated=False, copies=1, unsound=unsound)
        assert sound not in [rank.loaded for rank in world.ranks]


def test_a_script_that_counts_its_losses_and_saves_alike_has_snapshots_that_earlier_releases_read(tmp_path: Path):
    with played_site(tmp_path) as site:
        node = site.node()
        [rank] = site.begin([node], ranks_of_node=1, replicated=True, copies=0).ranks
        for losses, named in ((0, False), (100, True)):
            rank.losses = losses
            rank.step()
            rank.finish()
            [newest] = [header for _, header in node.snapshots() if header.step == rank.at]
            assert (newest.reported is not None, "reported" in newest.fields()) == (named, named)
