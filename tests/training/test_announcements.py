"""The step that all ranks store, where a script saves few steps, or ranks make steps apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from perdure_training.checkpoint import schedule, slots
from perdure_training.checkpoint.announcements import Announcements
from perdure_training.checkpoint.schedule import Schedule
from perdure_training.node_api.storage_link import find_storage
from tests.support.waiting import wait_for
from tests.training.ranks_in_threads import RankThreads, rank_threads

RANKS = 2
APART = 8
"""Steps that the ranks make before they wait for each other."""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path, keep_last=10, every=20) as ranks:
        yield ranks


def save(ranks: RankThreads, step: int) -> None:
    assert ranks.save(step, [{"step": step}] * RANKS) == [True] * RANKS
    for checkpointer in ranks.checkpointers:
        checkpointer.flush()


def request(ranks: RankThreads) -> None:
    """A user requests a checkpoint, and the ranks can know it."""
    ranks.agent.request_checkpoint(1)
    link = find_storage()
    assert link is not None
    wait_for(lambda: link.desired().get("request") == 1)


def test_a_script_that_saves_each_fifth_step_stores_its_checkpoints(ranks: RankThreads):
    ranks.begin([{"step": 0} for _ in range(RANKS)])
    for step in range(5, 30, 5):
        save(ranks, step)
    assert wait_for(lambda: ranks.steps) == [20]


def test_a_request_is_answered_by_the_next_step_that_is_saved(ranks: RankThreads):
    ranks.begin([{"step": 0} for _ in range(RANKS)])
    save(ranks, 1)
    request(ranks)
    for step in (4, 9, 10):
        save(ranks, step)
    commit = wait_for(lambda: ranks.agent.committed)
    assert (commit.checkpoint.step, commit.answers) == (9, 1)


def test_ranks_that_make_steps_apart_store_one_step_once_they_know_how_far(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(schedule, "_NEXT_TRY", 9e9)
    monkeypatch.setattr(slots, "_PATIENCE", 0.1)
    ranks.begin([{"step": 0} for _ in range(RANKS)])
    request(ranks)
    ahead, together = threading.Event(), threading.Barrier(RANKS)

    def train(rank: int) -> None:
        step = 0
        while True:
            if rank == 0:
                # Rank 1 has passed what rank 0 announces first.
                ahead.wait()
            for _ in range(APART):
                step += 1
                ranks.checkpointers[rank].save(step, {"step": step})
                time.sleep(0.01)
            ranks.checkpointers[rank].flush()
            if rank == 1:
                ahead.set()
            try:
                together.wait()
            except threading.BrokenBarrierError:
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    try:
        [problem] = wait_for(lambda: ranks.agent.problems)
        assert problem == "rank 0: this rank had passed it when it learned that it was to be stored"
        # The job's own checkpoint is due each 20 steps.
        assert wait_for(lambda: ranks.agent.committed).answers == 1
        assert ranks.agent.problems == [problem]
    finally:
        together.abort()
        for thread in threads:
            thread.join()


def test_each_announcement_is_of_the_first_step_at_or_after_it_that_is_saved():
    announced = Announcements(HashStore())
    stored: list[int] = []
    for step in range(10, 80, 10):
        if step in {20, 40}:
            announced.make(step + 2)
        announced.record(step)
        if announced.has(step):
            stored.append(step)
    assert stored == [30, 50]


def test_the_thread_that_lags_behind_learns_the_same():
    announced = Announcements(HashStore())
    announced.make(12)
    for step in (11, 12, 13):
        announced.record(step)
    assert [announced.has(step) for step in (13, 12, 11, 12)] == [False, True, False, True]


def test_a_rank_that_learns_late_of_an_announcement_stores_its_next_step():
    announced = Announcements(HashStore())
    for step in (11, 12, 13):
        announced.record(step)
        assert not announced.has(step)
    announced.make(12)
    announced.record(14)
    assert announced.has(14)
    assert [announced.has_passed(step) for step in (12, 13, 14, 15)] == [True, True, False, False]


def test_a_step_that_is_stored_anyhow_is_the_announced_one():
    announced = Announcements(HashStore())
    announced.make(12)
    announced.record(12)
    announced.expect(12)
    assert announced.has(12)
    announced.record(13)
    assert not announced.has(13)


def test_the_lead_grows_by_how_far_ranks_are_apart_and_not_without_end():
    desired: dict[str, Any] = {"request": 1}
    assert Schedule(every_steps=None, every_seconds=9e9).next_target(1, every=1, desired=desired) == 3
    for apart, target in ((6, 17), (10**6, 1001)):
        found = Schedule(every_steps=None, every_seconds=9e9)
        found.lead_by(apart)
        assert found.next_target(1, every=1, desired=desired) == target
