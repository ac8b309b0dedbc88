"""Checkpoints none of which can be loaded: the ranks of a world stop, or start over, and nothing is deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.contract import CheckpointRef, CheckpointRestored
from perdure_training.node_api.bodies import UnsoundSteps
from perdure_training.node_api.storage_link import CheckpointsUnusable
from tests.support.waiting import wait_for
from tests.training.ranks_in_threads import RankThreads, rank_threads

WITHIN = 60.0
RANKS = 2


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path, keep_last=2) as ranks:
        yield ranks


def states(step: int = 0) -> list[dict[str, Any]]:
    return [{"weights": torch.full((2000,), float(step)), "step": step} for _ in range(RANKS)]


def stored(ranks: RankThreads, *steps: int) -> None:
    assert ranks.begin(states(), lose_memory=True) == [None] * RANKS
    for step in steps:
        assert ranks.save(step, states(step), durable=True) == [True] * RANKS
        assert ranks.wait_until_durable(WITHIN) == [True] * RANKS


def tear(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def lose_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def lose_part(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def folders(ranks: RankThreads) -> list[Path]:
    return sorted(ranks.storage.glob("step-*"))


@pytest.mark.parametrize(
    ("damage", "described"),
    [
        (tear, "__0_0.distcp has"),
        (lose_metadata, ".metadata is missing"),
        (lose_part, "__1_0.distcp is missing"),
    ],
)
def test_ranks_that_can_load_none_stop_and_name_each_with_its_damage(
    ranks: RankThreads, damage: Callable[[Path], None], described: str
):
    stored(ranks, 1, 2)
    damaged = folders(ranks)
    for folder in damaged:
        damage(folder)
    files = sorted(ranks.storage.rglob("*"))
    ranks.prepare(RANKS, lose_memory=True)

    def restore(rank: int) -> str:
        with pytest.raises(CheckpointsUnusable) as raised:
            ranks.checkpointers[rank].restore(states()[rank])
        return str(raised.value)

    [text] = set(ranks.each(restore))
    [report] = wait_for(lambda: [one.restored for one in ranks.agent.of(CheckpointRestored) if one.restored.stops])
    assert len(report.unusable) == 2
    for folder, named in zip(reversed(damaged), report.unusable, strict=True):
        assert named.startswith(f"{folder.name}: {described}")
        assert named in text
    assert sorted(ranks.storage.rglob("*")) == files


def test_a_job_that_may_start_over_does_and_deletes_none_of_those_that_it_could_not_load(tmp_path: Path):
    with rank_threads(tmp_path, keep_last=1, on_unusable="start_over") as ranks:
        stored(ranks, 6)
        [other] = folders(ranks)
        # As a run before this one has left it.
        other = other.rename(other.with_name("step-6-before-1"))
        tear(other)
        stored(ranks, 7)
        [own] = [folder for folder in folders(ranks) if folder != other]
        lose_part(own)
        stored(ranks, 1, 2, 3, 8, 9)
        assert wait_for(lambda: folders(ranks) == [other, own, ranks.storage / "step-9-run-3"])
        [first, second] = [one.restored.unusable for one in ranks.agent.of(CheckpointRestored) if one.restored.unusable]
        assert [text.split(":")[0] for text in first] == [other.name]
        assert [text.split(":")[0] for text in second] == [own.name, other.name]


def test_a_distrusted_checkpoint_is_loaded_where_the_others_are_damaged(
    ranks: RankThreads, caplog: pytest.LogCaptureFixture
):
    stored(ranks, 1, 2)
    older, newer = folders(ranks)
    ranks.agent.distrusted = (CheckpointRef.parse(newer.name),)
    tear(older)
    assert ranks.begin(states(), lose_memory=True) == [2] * RANKS
    assert "step 2 is loaded nevertheless" in caplog.text


def test_of_those_that_are_all_distrusted_the_oldest_sound_one_is_loaded(ranks: RankThreads):
    stored(ranks, 1, 2)
    ranks.agent.distrusted = tuple(CheckpointRef.parse(one.name) for one in folders(ranks))
    assert ranks.begin(states(), lose_memory=True) == [1] * RANKS


def test_what_was_saved_after_the_last_sound_step_is_not_loaded_but_what_is_made_again_is(ranks: RankThreads):
    stored(ranks, 1, 2, 3)
    ranks.agent.unsound = UnsoundSteps(generation=ranks.agent.generation, after=2)
    assert ranks.begin(states(), lose_memory=True) == [2] * RANKS
    assert ranks.save(3, states(), durable=True) == [True] * RANKS
    assert ranks.wait_until_durable(30) == [True] * RANKS
    assert ranks.begin(states(), lose_memory=True) == [3] * RANKS


def test_what_is_not_sound_takes_no_place_of_what_is_kept(ranks: RankThreads):
    stored(ranks, 1, 2)
    ranks.agent.unsound = UnsoundSteps(generation=ranks.agent.generation, after=1)
    assert ranks.begin(states(), lose_memory=True) == [1] * RANKS
    assert ranks.save(3, states(), durable=True) == [True] * RANKS
    assert ranks.wait_until_durable(30) == [True] * RANKS
    kept = wait_for(lambda: len(found := folders(ranks)) == 2 and [one.name for one in found], within=WITHIN)
    assert kept == ["step-1-run-1", "step-3-run-2"]


def test_a_storage_without_checkpoints_is_no_reason_to_stop(ranks: RankThreads):
    ranks.storage.mkdir(parents=True)
    (ranks.storage / "step-4-run-1").mkdir()
    (ranks.storage / "step-4-run-1" / "__0_0.distcp").write_bytes(b"of a run that ended")
    assert ranks.begin(states()) == [None] * RANKS
