"""Ranks do not begin below a state that is known to have existed: they look in all places, wait, and say what they
found."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.agent.checkpoint import keeper
from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointRef, CheckpointRestored, Restore, RestoreSource, StorageFinding
from perdure_training.checkpoint import state_search
from perdure_training.checkpoint import stored as stored_checkpoints
from perdure_training.node_api.storage_link import StateLost
from tests.support.waiting import wait_for
from tests.training.ranks_in_threads import RankThreads, rank_threads

WITHIN = 60.0
RANKS = 2


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_search, "SURE", 0.2)
    monkeypatch.setattr(state_search, "_REPORTED", 0.1)
    monkeypatch.setattr(state_search, "_KEPT_ALIVE", 0.1)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path, keep_last=5) as ranks:
        yield ranks


def states(step: int = 0) -> list[dict[str, Any]]:
    return [{"weights": torch.full((200,), float(step)), "step": step} for _ in range(RANKS)]


def stored(ranks: RankThreads, *steps: int) -> None:
    """A first world stores these steps."""
    assert ranks.begin(states()) == [None] * RANKS
    for step in steps:
        assert ranks.save(step, states(step), durable=True) == [True] * RANKS
        assert ranks.wait_until_durable(WITHIN) == [True] * RANKS


def know(ranks: RankThreads, *folders: str, on_loss: str = "wait", may_return: bool = False) -> None:
    """The job knows that its storage has these checkpoints."""
    known = [{"folder": folder, "loads": True} for folder in folders]
    content = {"stored": known, "on_loss": on_loss, "may_return": may_return}
    ranks.variables["PERDURE_KNOWN_STATES"] = json.dumps(content)


@contextmanager
def restoring(ranks: RankThreads, found: list[dict[str, Any]]) -> Iterator[Future[list[int | None]]]:
    """The ranks restore, in a thread."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(ranks.each, lambda rank: ranks.checkpointers[rank].restore(found[rank]))


def newest(ranks: RankThreads) -> Restore:
    """What the present world has reported when it had searched."""

    def reported() -> list[Restore]:
        messages = [one for one in ranks.agent.of(CheckpointRestored) if one.generation == ranks.agent.generation]
        return [one.restored for one in messages if not one.restored.waits]

    return wait_for(reported)[-1]


def test_a_storage_that_is_not_mounted_is_waited_for_and_named(ranks: RankThreads):
    stored(ranks, 5)
    know(ranks, "step-5-run-1")
    away = ranks.storage.rename(ranks.storage.with_name("unmounted"))
    ranks.prepare(RANKS, lose_memory=True)
    found = states()
    with restoring(ranks, found) as loaded:
        report = wait_for(lambda: [one for one in ranks.agent.searches if one.waits])[-1]
        wait_for(lambda: ranks.agent.awaited_state)
        assert not loaded.done()
        # An empty folder stands where it is mounted.
        ranks.storage.mkdir()
        away.rename(ranks.storage)
        assert loaded.result(WITHIN) == [5] * RANKS
    assert report.lookup is not None
    assert (report.lookup.storage, report.lookup.stored, report.source) == (
        StorageFinding.LACKS,
        5,
        RestoreSource.NOTHING,
    )
    assert f"file://{ranks.storage} has no step-5-run-1" in f"file://{report.lookup.problem}"
    assert [one["step"] for one in found] == [5] * RANKS
    loaded_report = newest(ranks)
    assert (loaded_report.step, loaded_report.waits) == (5, False)
    assert loaded_report.lookup is not None
    assert (loaded_report.lookup.storage, loaded_report.lookup.in_storage) == (StorageFinding.FOUND, 5)


def test_a_storage_that_hangs_once_it_was_listed_is_waited_for_and_named(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    hangs, damage = threading.Event(), keeper.damage
    hangs.set()

    def verify(storage: Storage, saved: CheckpointRef, *, share: tuple[int, int]) -> str:
        if hangs.is_set() and share[0]:
            raise OSError(f"{storage.url} hangs")
        return damage(storage, saved, share=share)

    monkeypatch.setattr(stored_checkpoints, "_TRIED_FOR", 0.2)
    monkeypatch.setattr(keeper, "damage", verify)
    stored(ranks, 5)
    know(ranks, "step-5-run-1")
    ranks.prepare(RANKS, lose_memory=True)
    found = states()
    with restoring(ranks, found) as loaded:
        report = wait_for(lambda: [one for one in ranks.agent.searches if one.waits])[-1]
        wait_for(lambda: ranks.agent.awaited_state > 1)
        assert not loaded.done()
        hangs.clear()
        assert loaded.result(WITHIN) == [5] * RANKS
    assert report.lookup is not None
    assert (report.lookup.storage, report.lookup.stored) == (StorageFinding.AWAY, 5)
    assert "hangs" in report.lookup.problem
    assert (newest(ranks).step, found[1]["step"]) == (5, 5)


def test_a_job_that_has_forgotten_the_wait_is_told_of_it_again(ranks: RankThreads, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state_search, "REPEATED", 0.0)
    stored(ranks, 5)
    know(ranks, "step-5-run-1")
    away = ranks.storage.rename(ranks.storage.with_name("unmounted"))
    ranks.prepare(RANKS, lose_memory=True)
    with restoring(ranks, states()) as loaded:
        told = wait_for(lambda: (waits := [one for one in ranks.agent.searches if one.waits])[2:] and waits)
        ranks.storage.mkdir()
        away.rename(ranks.storage)
        assert loaded.result(WITHIN) == [5] * RANKS
    assert told[0] == told[2]


def test_another_storage_with_checkpoints_of_others_is_not_taken_for_the_own_one(ranks: RankThreads):
    stored(ranks, 5)
    know(ranks, "step-9-before-3", on_loss="stop")
    ranks.prepare(RANKS, lose_memory=True)

    def restore(rank: int) -> str:
        with pytest.raises(StateLost) as raised:
            ranks.checkpointers[rank].restore(states()[rank])
        return str(raised.value)

    [text] = set(ranks.each(restore))
    assert text.startswith("step 9 is stored and cannot be loaded")
    report = newest(ranks)
    assert report.stops
    assert report.lookup is not None
    assert (report.lookup.storage, report.lookup.in_storage) == (StorageFinding.LACKS, 5)


def test_a_job_that_takes_older_states_begins_with_the_newest_that_is_there(ranks: RankThreads):
    stored(ranks, 5)
    know(ranks, "step-9-run-1", on_loss="older")
    assert ranks.begin(states(), lose_memory=True) == [5] * RANKS
    shutil.rmtree(ranks.storage)
    assert ranks.begin(states(), lose_memory=True) == [None] * RANKS
    report = newest(ranks)
    assert (report.step, report.source) == (0, RestoreSource.NOTHING)
    assert report.lookup is not None
    assert (report.lookup.stored, report.lookup.storage) == (9, StorageFinding.LACKS)


def test_a_first_start_reports_that_there_was_nothing(ranks: RankThreads):
    know(ranks)
    assert ranks.begin(states()) == [None] * RANKS
    report = newest(ranks)
    assert (report.source, report.waits, report.stops) == (RestoreSource.NOTHING, False, False)
    assert report.lookup is not None
    assert report.lookup.newest < 0
    assert report.lookup.storage is StorageFinding.EMPTY


def test_a_world_that_ended_before_its_first_save_has_lost_nothing(ranks: RankThreads):
    know(ranks, on_loss="stop")
    assert ranks.begin(states()) == [None] * RANKS
    assert ranks.begin(states()) == [None] * RANKS
    assert not newest(ranks).stops


def test_a_newer_step_in_storage_is_loaded_before_an_older_one_in_memory(ranks: RankThreads, tmp_path: Path):
    stored(ranks, 5)
    left = shutil.copytree(ranks.memory, tmp_path / "left")
    assert ranks.save(9, states(9), durable=True) == [True] * RANKS
    assert ranks.wait_until_durable(WITHIN) == [True] * RANKS
    shutil.rmtree(ranks.memory)
    # What a launcher left that was killed weeks ago.
    shutil.copytree(left, ranks.memory)
    know(ranks, "step-9-run-1")
    found = states()
    assert ranks.begin(found) == [9] * RANKS
    assert [one["step"] for one in found] == [9] * RANKS
    assert newest(ranks).source is RestoreSource.STORAGE
    assert ranks.save(10, states(10)) == [True] * RANKS
    for checkpointer in ranks.checkpointers:
        checkpointer.flush()
    assert ranks.begin(states()) == [10] * RANKS


def test_a_folder_that_a_killed_launcher_left_is_compared_with_the_storage_where_the_job_knows_nothing(
    ranks: RankThreads, tmp_path: Path
):
    stored(ranks, 5)
    left = shutil.copytree(ranks.memory, tmp_path / "left")
    assert ranks.save(9, states(9), durable=True) == [True] * RANKS
    assert ranks.wait_until_durable(WITHIN) == [True] * RANKS
    shutil.rmtree(ranks.memory)
    shutil.copytree(left, ranks.memory)
    ranks.variables["PERDURE_MEMORY_ORIGIN"] = "adopted"
    assert ranks.begin(states()) == [9] * RANKS


def test_the_newest_step_in_memory_is_loaded_without_a_look_into_the_storage(ranks: RankThreads):
    stored(ranks, 5)
    assert ranks.save(6, states(6)) == [True] * RANKS
    for checkpointer in ranks.checkpointers:
        checkpointer.flush()
    know(ranks, "step-5-run-1")
    ranks.storage.rename(ranks.storage.with_name("unmounted"))
    assert ranks.begin(states()) == [6] * RANKS
    report = newest(ranks)
    assert report.lookup is not None
    assert report.lookup.storage is StorageFinding.UNUSED


def test_damaged_newer_checkpoints_leave_the_older_step_in_memory(ranks: RankThreads, tmp_path: Path):
    stored(ranks, 5)
    left = shutil.copytree(ranks.memory, tmp_path / "left")
    assert ranks.save(9, states(9), durable=True) == [True] * RANKS
    assert ranks.wait_until_durable(WITHIN) == [True] * RANKS
    shutil.rmtree(ranks.memory)
    shutil.copytree(left, ranks.memory)
    file = ranks.storage / "step-9-run-1" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    know(ranks, "step-9-run-1")
    assert ranks.begin(states()) == [5] * RANKS
    assert newest(ranks).source is RestoreSource.MEMORY


def parts(step: int = 0) -> list[dict[str, Any]]:
    """States of which each rank has a part of its own, which no other world can have."""
    return [{"part": torch.full((200,), float(step + rank))} for rank in range(RANKS)]


def saved_parts(ranks: RankThreads) -> None:
    """A world of two has complete steps in memory."""
    assert ranks.begin(parts()) == [None] * RANKS
    for step in range(1, 7):
        assert ranks.save(step, parts(step)) == [True] * RANKS
        for checkpointer in ranks.checkpointers:
            checkpointer.flush()


def part_of_another_node(ranks: RankThreads, away: Path | None) -> None:
    """A node leaves with what rank 1 has in memory."""
    for path in list(ranks.memory.rglob("rank-1-of-*.[0-9]")):
        if away is None:
            path.unlink()
        else:
            path.rename(away / path.name)


def test_a_smaller_world_waits_for_a_state_that_it_cannot_have_as_long_as_a_node_may_return(ranks: RankThreads):
    saved_parts(ranks)
    away = ranks.memory.with_name("away")
    away.mkdir()
    part_of_another_node(ranks, away)
    know(ranks, may_return=True)
    ranks.prepare(1)
    raised: list[BaseException] = []

    def restore() -> None:
        try:
            ranks.checkpointers[0].restore(parts()[0])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=restore, daemon=True)
    thread.start()
    report = wait_for(lambda: [one for one in ranks.agent.searches if one.waits])[-1]
    assert report.lookup is not None
    assert report.lookup.newest >= 5
    assert report.lookup.seen_in_memory == 6
    assert thread.is_alive()
    # The node is back: the store of the world that waits ends with it.
    found = parts()
    for path in away.iterdir():
        path.rename(next(ranks.memory.glob("stage-0/*")) / path.name)
    know(ranks)
    assert ranks.begin(found) == [6] * RANKS
    assert [float(one["part"][0]) for one in found] == [6.0, 7.0]
    thread.join(WITHIN)
    assert not thread.is_alive()
    assert raised


@pytest.mark.parametrize("on_loss", ["older", "wait"])
def test_what_no_node_can_bring_back_is_not_waited_for_and_told(ranks: RankThreads, on_loss: str):
    saved_parts(ranks)
    part_of_another_node(ranks, None)
    know(ranks, on_loss=on_loss)
    ranks.prepare(1)
    assert ranks.checkpointers[0].restore(parts()[0]) is None
    report = newest(ranks)
    assert (report.source, report.waits) == (RestoreSource.NOTHING, False)
    assert report.lookup is not None
    assert report.lookup.newest >= 5
