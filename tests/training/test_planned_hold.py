"""Ranks that wait at a step for a change that is planned, and train on where they need not or may not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import Store

from perdure.contract import CheckpointStored, HoldRequest, SnapshotUse
from perdure_training.checkpoint import planned_hold
from perdure_training.checkpoint.peers import Peers
from perdure_training.checkpoint.world import Completeness, RankIdentity
from perdure_training.snapshots.arena import Arena
from tests.support.waiting import wait_for
from tests.training.ranks_in_threads import RankThreads, State, rank_threads


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path) as ranks:
        yield ranks


class Training:
    """Ranks that make steps together, as by a collective, and save each of them."""

    def __init__(self, ranks: RankThreads, states: list[State], *, every: int) -> None:
        self.ranks = ranks
        self.states = states
        self.made = [0] * len(states)
        self._every = every
        self._together = threading.Barrier(len(states))
        self._threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(len(states))]
        for thread in self._threads:
            thread.start()

    def _train(self, rank: int) -> None:
        with suppress(threading.BrokenBarrierError):
            while True:
                self._together.wait()
                step = self.made[rank] + 1
                self.states[rank]["step"] = step
                self.ranks.checkpointers[rank].save(step, self.states[rank])
                self.made[rank] = step
                time.sleep(0.01)

    def continues(self) -> bool:
        """Waits for a step after the present ones."""
        newest = max(self.made)
        return bool(wait_for(lambda: min(self.made) > newest))

    def end(self) -> None:
        self.ranks.agent.request_hold(None)
        self._together.abort()
        for thread in self._threads:
            thread.join()


@contextmanager
def training(
    ranks: RankThreads, number: int = 3, *, own: Callable[[int], Any] = lambda _: 0, every: int = 1, **arguments: Any
) -> Iterator[Training]:
    states = [{"value": own(rank), "step": 0} for rank in range(number)]
    ranks.begin(states, every=every, **arguments)
    found = Training(ranks, states, every=every)
    try:
        wait_for(lambda: min(found.made) > 3)
        yield found
    finally:
        found.end()


def answers(ranks: RankThreads) -> list[CheckpointStored]:
    return [one for one in ranks.agent.of(CheckpointStored) if one.stored.in_memory]


@pytest.mark.parametrize("every", [1, 1000])
def test_all_ranks_wait_at_one_step_and_train_on_when_the_change_is_withdrawn(ranks: RankThreads, every: int):
    with training(ranks, every=every) as running:
        assert running.continues()
        ranks.agent.request_hold(HoldRequest(number=1, generation=1, resizes=True, copies=True))
        [answer] = wait_for(lambda: answers(ranks))
        assert (answer.problem, answer.stored.answers) == ("", 1)
        step = answer.stored.checkpoint.step
        assert {state["step"] for state in running.states} == {step}, "all have saved it, and none has gone beyond"
        again = [{"value": 1, "step": 0} for _ in range(3)]
        ranks.agent.request_hold(None)
        assert running.continues()
        assert len(answers(ranks)) == 1
    [found] = set(ranks.begin(again))
    # Ranks that end at different steps have the last one that all of them saved.
    assert found in ((min(running.made), max(running.made)) if every == 1 else (step,))


def test_the_copies_of_the_step_are_waited_for(ranks: RankThreads, monkeypatch: pytest.MonkeyPatch):
    arrives = threading.Event()
    monkeypatch.setattr(Peers, "copy", lambda *_, **__: arrives.wait(60.0))
    with training(ranks, copies=1) as running:
        ranks.agent.request_hold(HoldRequest(number=1, generation=1, copies=True))
        wait_for(lambda: len({state["step"] for state in running.states}) == 1 and running.made)
        assert not answers(ranks)
        arrives.set()
        [answer] = wait_for(lambda: answers(ranks))
        assert {state["step"] for state in running.states} == {answer.stored.checkpoint.step}


def test_values_that_another_world_cannot_split_are_named_and_the_training_goes_on(ranks: RankThreads):
    with training(ranks, own=lambda rank: rank) as running:
        ranks.agent.request_hold(HoldRequest(number=1, generation=1, resizes=True))
        [answer] = wait_for(lambda: answers(ranks))
        assert answer.problem == "value differs between ranks, and a world of another size cannot split that"
        assert running.continues()
        # A world of the same size gives each rank its own back.
        ranks.agent.request_hold(HoldRequest(number=2, generation=1))
        wait_for(lambda: len(answers(ranks)) == 2)
        assert not answers(ranks)[1].problem


def test_copies_that_do_not_arrive_are_not_waited_for_without_end(ranks: RankThreads, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planned_hold, "_SAFE_WITHIN", 0.5)
    monkeypatch.setattr(Peers, "copy", lambda *_, **__: False)
    with training(ranks, copies=1) as running:
        ranks.agent.request_hold(HoldRequest(number=1, generation=1, copies=True))
        [answer] = wait_for(lambda: answers(ranks))
        assert answer.problem == "its copies were not on other nodes within 0 s"
        assert running.continues()


def test_ranks_that_are_not_ended_train_on_and_requests_for_other_worlds_are_none_of_theirs(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planned_hold, "_ENDED_WITHIN", 0.5)
    with training(ranks) as running:
        ranks.agent.request_hold(HoldRequest(number=1, generation=7))
        assert running.continues()
        assert not answers(ranks)
        ranks.agent.request_hold(HoldRequest(number=2, generation=1))
        wait_for(lambda: answers(ranks))
        assert running.continues()


def test_the_agent_learns_how_the_state_is_kept(ranks: RankThreads):
    ranks.begin([{"step": 0}] * 2, copies=2)
    wait_for(lambda: len(ranks.agent.uses) == 2)
    assert ranks.agent.uses == [(1, SnapshotUse(replicated=False, copies=2, name="state"))] * 2


def test_ranks_with_two_checkpointers_do_not_wait_between_their_saves(ranks: RankThreads):
    with training(ranks) as running:
        second = [ranks.another(rank, 3, name="ema") for rank in range(3)]
        ranks.each(lambda rank: second[rank].restore({"step": 0}))
        ranks.agent.request_hold(HoldRequest(number=1, generation=1))
        assert running.continues()
        assert running.continues()
        assert not answers(ranks)


def test_a_rank_whose_store_has_ended_with_its_world_makes_no_step_before_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("_SAFE_WITHIN", "_ENDED_WITHIN", "_REPORTED_WITHIN", "_MARGIN"):
        monkeypatch.setattr(planned_hold, name, 0.1)
    store = mock.create_autospec(Store, instance=True)
    store.check.side_effect = RuntimeError("the connection is closed")
    own = RankIdentity(
        rank=1, world_size=2, local_rank=1, local_world_size=2, generation=1, folder=tmp_path, store=("127.0.0.1", 1)
    )
    held = planned_hold.PlannedHold(own, store, mock.create_autospec(Completeness, instance=True), None)
    began = time.monotonic()
    held.wait(
        planned_hold.Hold(number=1, resizes=False, copies=False),
        4,
        saved=True,
        arena=Arena(tmp_path),
        each_rank=(),
        common=(),
    )
    assert time.monotonic() - began >= 0.4
