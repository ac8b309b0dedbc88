"""Steps that are requested faster than the storage takes them: all ranks store the same ones, and know what became of
them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.agent.checkpoint import keeper
from perdure.agent.checkpoint.storage import Storage
from perdure.contract import CheckpointStored
from perdure_training.checkpoint import generation, schedule, slots
from perdure_training.checkpoint.durable import DurableCheckpoints
from perdure_training.checkpoint.durable_requests import DurableRequests, Request, Snapshot
from perdure_training.checkpoint.store_round import Superseded
from perdure_training.snapshots.arena import Header, SnapshotPin
from tests.support.waiting import wait_for
from tests.training.ranks_in_threads import RankThreads, rank_threads

WITHIN = 60.0
RANKS = 2
FULL = OSError(28, "No space left on device")


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path, keep_last=10) as ranks:
        yield ranks


class SlowStorage:
    """A storage that takes nothing until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.takes = threading.Event()
        self.error: OSError | None = None
        write = Storage.write

        def waits(storage: Storage, path: str, pieces: Any) -> tuple[int, int]:
            self.entered.set()
            if self.error is not None:
                raise self.error
            assert self.takes.wait(WITHIN)
            return write(storage, path, pieces)

        monkeypatch.setattr(Storage, "write", waits)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowStorage]:
    slow = SlowStorage(monkeypatch)
    yield slow
    slow.error = None
    slow.takes.set()


def states(step: int = 0) -> list[dict[str, Any]]:
    return [{"weights": torch.full((1000,), float(step)), "step": step} for _ in range(RANKS)]


def test_the_newest_of_many_requests_is_stored_in_the_end_and_all_ranks_know_it(
    ranks: RankThreads, storage: SlowStorage
):
    assert ranks.begin(states()) == [None, None]
    assert ranks.save(5, states(5), durable=True) == [True, True]
    assert storage.entered.wait(WITHIN)
    for step in range(6, 31):
        durable = step % 5 == 0
        assert ranks.save(step, states(step), durable=durable) == [True, True] or not durable
    storage.takes.set()
    assert ranks.wait_until_durable(WITHIN) == [True, True]
    assert ranks.steps == [30, 5], "the one that was being stored, and the newest; those between were superseded"
    assert not ranks.agent.problems
    again = states()
    assert ranks.begin(again, lose_memory=True) == [30, 30]
    assert all(torch.equal(one["weights"], torch.full((1000,), 30.0)) for one in again)


def test_a_step_that_is_to_be_stored_waits_for_none_that_other_ranks_have_left_out(
    ranks: RankThreads, storage: SlowStorage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slots, "_PATIENCE", 1e9)
    assert ranks.begin(states()) == [None, None]
    assert ranks.save(5, states(5), durable=True) == [True, True]
    assert storage.entered.wait(WITHIN)
    for rank, steps in enumerate([(6, 7, 8), (9, 10, 11)]):
        for step in steps:
            assert ranks.checkpointers[rank].save(step, states(step)[rank])
            ranks.checkpointers[rank].flush()
    assert ranks.save(12, states(12)) == [False, False]
    assert ranks.save(15, states(15), durable=True) == [True, True]
    storage.takes.set()
    assert ranks.wait_until_durable(WITHIN) == [True, True]
    assert ranks.steps == [15, 5]


def test_a_rank_without_room_for_a_requested_step_keeps_no_other_waiting_for_it(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(schedule, "_NEXT_TRY", 0.0)
    choose, full = slots.Slots.choose, {1}

    def without_room(one: Any, **arguments: Any) -> Any:
        return None if one._rank in full else choose(one, **arguments)

    monkeypatch.setattr(slots.Slots, "choose", without_room)
    steps = itertools.count(1)

    def save() -> None:
        step = next(steps)
        ranks.save(step, states(step))

    assert ranks.begin(states()) == [None, None]
    ranks.agent.request_checkpoint(1)
    with monkeypatch.context() as hurried:
        hurried.setattr(generation, "_ANNOUNCED_WITHIN", 0.1)
        problems = wait_for(lambda: save() or ranks.agent.problems)
    assert problems[0] == "rank 1: no room to save it within 0 s"
    full.clear()
    # Each rank has saved steps that the other one lacks.
    monkeypatch.setattr(slots, "_PATIENCE", 0.5)
    assert wait_for(lambda: save() or ranks.agent.committed).answers == 1


@pytest.mark.long("storage")
def test_a_full_storage_is_not_durable_and_the_reason_is_named(
    ranks: RankThreads, storage: SlowStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeper, "_LONGEST_PAUSE", 0.1)
    storage.error = FULL
    assert ranks.begin(states()) == [None, None]
    for step in range(1, 31):
        ranks.save(step, states(step), durable=step % 5 == 0)
    wait_for(lambda: ranks.agent.problems)
    assert ranks.wait_until_durable(1.0) == [False, False]
    assert "step 30 is not durable" in caplog.text
    assert "No space left on device" in caplog.text
    assert ranks.steps == []
    storage.error = None
    storage.takes.set()
    assert ranks.wait_until_durable(WITHIN) == [True, True]
    assert ranks.steps[0] == 30


def test_a_step_that_is_given_up_is_not_waited_for_and_the_control_plane_learns_it(
    ranks: RankThreads, storage: SlowStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeper, "_TRIES_WITHIN", 0.0)
    storage.error = FULL
    assert ranks.begin(states()) == [None, None]
    for step in (1, 2, 3):
        assert ranks.save(step, states(step), durable=True) == [True, True]
    assert ranks.wait_until_durable(WITHIN) == [False, False]
    assert "within" not in caplog.text
    assert ranks.agent.of(CheckpointStored)[-1].stored.checkpoint.step == 3
    assert "No space left on device" in ranks.agent.of(CheckpointStored)[-1].problem
    storage.error = None
    storage.takes.set()
    assert ranks.save(4, states(4), durable=True) == [True, True]
    assert ranks.wait_until_durable(WITHIN) == [True, True]
    assert ranks.steps == [4]


class CannotBePickled:
    def __reduce__(self) -> str:
        raise TypeError("holds a socket")


def test_a_rank_that_cannot_save_a_step_has_all_ranks_and_the_control_plane_know_why(
    ranks: RankThreads, caplog: pytest.LogCaptureFixture
):
    assert ranks.begin(states()) == [None, None]
    state = states(1)
    state[1]["step"] = CannotBePickled()

    def save(rank: int) -> bool:
        try:
            return ranks.checkpointers[rank].save(1, state[rank], durable=True)
        except TypeError:
            return False

    assert ranks.each(save) == [True, False]
    assert ranks.wait_until_durable(WITHIN) == [False, False]
    assert caplog.text.count("step 1 is not durable: rank 1: TypeError: holds a socket") == RANKS
    [problem] = wait_for(lambda: ranks.agent.problems)
    assert problem == "rank 1: TypeError: holds a socket"
    assert ranks.save(2, states(2), durable=True) == [True, True]
    assert ranks.wait_until_durable(WITHIN) == [True, True]


def test_a_rank_that_is_ahead_stores_what_the_others_reach(ranks: RankThreads):
    assert ranks.begin(states()) == [None, None]
    ahead = threading.Event()

    def save(rank: int) -> list[bool]:
        assert rank or ahead.wait(WITHIN)
        saved = [ranks.checkpointers[rank].save(step, states(step)[rank], durable=True) for step in (1, 2, 3)]
        ahead.set()
        return saved

    assert ranks.each(save) == [[True] * 3] * RANKS
    assert ranks.wait_until_durable(WITHIN) == [True, True]
    assert ranks.steps[0] == 3
    assert not ranks.agent.problems


def test_a_step_that_is_still_copied_when_the_next_is_announced_answers_its_request(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(schedule, "_NEXT_TRY", 0.0)
    monkeypatch.setattr(slots, "_PATIENCE", 0.1)
    announced: list[int] = []
    store, announce, goes_on = DurableCheckpoints.store, schedule.Schedule._announce, threading.Event()

    def copied_late(one: DurableCheckpoints, *arguments: Any, **named: Any) -> None:
        assert goes_on.wait(WITHIN)
        store(one, *arguments, **named)

    def seen(one: schedule.Schedule, step: int) -> None:
        announced.append(step)
        announce(one, step)

    monkeypatch.setattr(DurableCheckpoints, "store", copied_late)
    monkeypatch.setattr(schedule.Schedule, "_announce", seen)
    assert ranks.begin(states()) == [None, None]
    ranks.agent.request_checkpoint(1)
    steps = itertools.count(1)

    def save() -> None:
        step = next(steps)
        ranks.save(step, states(step))

    wait_for(lambda: save() or len(announced) > 1)
    goes_on.set()
    commit = wait_for(lambda: ranks.agent.committed)
    assert (commit.checkpoint.step, commit.answers) == (announced[0], 1)


class FreedPin(SnapshotPin):
    def __init__(self) -> None:
        super().__init__(-1)
        self.is_free = False

    def release(self) -> None:
        self.is_free = True


def test_a_rank_keeps_what_it_has_offered_and_the_newest_and_gives_the_others_free():
    requests = DurableRequests()
    pins = [FreedPin() for _ in range(4)]
    for step, pin in enumerate(pins[:3]):
        header = Header(step=step, rank=0, world_size=2, generation=1, replicated=False, index_at=0, size=0, checksum=0)
        requests.add(Request(step, Snapshot(header, memoryview(b""), pin, None)))
        if step == 0:
            assert requests.offer() == 0
    assert [pin.is_free for pin in pins[:3]] == [False, True, False]
    with pytest.raises(Superseded, match="step 2 was requested since"):
        requests.take(1, within=0).taken()
    requests.finish(1)
    assert [pin.is_free for pin in pins[:3]] == [True, True, False]
    assert requests.offer() == 2
    assert requests.take(2, within=0).taken().header.step == 2
    requests.finish(2)
    assert pins[2].is_free
    assert not requests.is_busy
