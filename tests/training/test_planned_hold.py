"""Ranks that wait at a step for a change that is planned, and train on where they need not or may not."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed import Store

from perdure.contract import CheckpointStored, HoldRequest, SnapshotUse
from perdure_training.checkpoint import planned_hold
from perdure_training.checkpoint.peers import Peers
from perdure_training.checkpoint.planned_hold import HeldState
from perdure_training.checkpoint.save_turns import SaveTurns
from perdure_training.checkpoint.world import Completeness, RankIdentity
from perdure_training.node_api.storage_link import StorageLink, find_storage
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
        self.saved: list[set[int]] = [set() for _ in states]
        """The steps that each rank has saved: under load it may have no room for one."""
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
                if self.ranks.checkpointers[rank].save(step, self.states[rank]):
                    self.saved[rank].add(step)
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
    for checkpointer in ranks.checkpointers:
        checkpointer.flush()
    # Ranks that end at different steps have the last one that all of them saved.
    newest = max(set.intersection(*running.saved))
    assert set(ranks.begin(again)) == {newest}
    assert newest >= step if every == 1 else newest == step


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
    monkeypatch.setattr(planned_hold, "SAFE_WITHIN", 0.5)
    monkeypatch.setattr(Peers, "copy", lambda *_, **__: False)
    with training(ranks, copies=1) as running:
        ranks.agent.request_hold(HoldRequest(number=1, generation=1, copies=True))
        [answer] = wait_for(lambda: answers(ranks))
        assert answer.problem == "its copies were not on other nodes within 0 s"
        assert running.continues()


def test_ranks_that_are_not_ended_train_on_and_requests_for_other_worlds_are_none_of_theirs(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planned_hold, "ENDED_WITHIN", 0.5)
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
    assert ranks.agent.uses == [(1, SnapshotUse(replicated=False, copies=2))] * 2


def request_stored(ranks: RankThreads) -> None:
    """The job is to be suspended."""
    ranks.agent.requested = 1
    ranks.agent.request_hold(HoldRequest(number=1, generation=1, stores=1, within=timedelta(seconds=60)))


def stored(ranks: RankThreads) -> dict[str, int]:
    """The steps of the checkpoints that answer the request, by place."""
    found = [one.stored for one in ranks.agent.of(CheckpointStored) if one.stored.answers == 1]
    return {one.checkpoint.place: one.checkpoint.step for one in found if not one.in_memory}


@pytest.mark.parametrize("arguments", [{"every": 1}, {"every": 1000}, {"every": 1, "replicated": True}])
def test_the_step_at_which_all_ranks_wait_is_the_one_that_is_stored(ranks: RankThreads, arguments: dict[str, Any]):
    with training(ranks, **arguments) as running:
        request_stored(ranks)
        commit = wait_for(lambda: ranks.agent.committed)
        [answer] = answers(ranks)
        step = answer.stored.checkpoint.step
        assert (commit.answers, commit.checkpoint.step) == (1, step)
        assert [state["step"] for state in running.states] == [step] * 3
        assert ranks.steps == [step], "no other step is stored for it"
        # The job is resumed before it was suspended.
        ranks.agent.request_hold(None)
        assert running.continues()
        assert ranks.steps == [step]
    assert ranks.begin([{"value": 0, "step": 0}] * 3, lose_memory=True) == [step] * 3


def test_a_step_that_is_not_stored_by_waiting_ranks_is_stored_while_they_train(
    ranks: RankThreads, monkeypatch: pytest.MonkeyPatch
):
    """As where the checkpointers save in no order that is known."""
    monkeypatch.setattr(planned_hold, "_CHOSEN_WITHIN", 0.5)
    monkeypatch.setattr(SaveTurns, "turn_of", lambda *_: frozenset())
    with training(ranks) as running:
        request_stored(ranks)
        commit = wait_for(lambda: ranks.agent.committed)
        assert (commit.answers, answers(ranks)) == (1, [])
        assert running.continues()


def test_where_the_ranks_do_not_wait_at_the_step_the_request_stays(ranks: RankThreads, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planned_hold, "SAFE_WITHIN", 0.2)
    monkeypatch.setattr(Completeness, "is_complete", lambda *_: False)
    with training(ranks) as running:
        request_stored(ranks)
        [answer] = wait_for(lambda: answers(ranks))
        assert answer.problem == "not all ranks had saved it within 0 s"
        assert running.continues()
        assert wait_for(lambda: ranks.agent.committed).answers == 1


class Turns:
    """A training whose ranks save two states in turn, each of which counts from a step of its own."""

    def __init__(self, ranks: RankThreads, number: int, *, begins: dict[str, int], order: Sequence[str]) -> None:
        ranks.prepare(number, name="model", copies=1)
        average = [ranks.another(rank, number, name="average", replicated=True) for rank in range(number)]
        checkpointers = {"model": ranks.checkpointers, "average": average}
        self.states = [{name: {"step": begins[name]} for name in begins} for _ in range(number)]
        ranks.each(lambda rank: [checkpointers[name][rank].restore(self.states[rank][name]) for name in checkpointers])
        self._ranks = ranks
        self._checkpointers = checkpointers
        self._order = order
        self._together = threading.Barrier(number)
        self._threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(number)]
        for thread in self._threads:
            thread.start()

    def _train(self, rank: int) -> None:
        with suppress(threading.BrokenBarrierError):
            while True:
                self._together.wait()
                for state in self.states[rank].values():
                    state["step"] += 1
                for name in self._order:
                    state = self.states[rank][name]
                    self._checkpointers[name][rank].save(state["step"], state)
                time.sleep(0.01)

    def continues(self) -> bool:
        """Waits for a step after the present ones."""
        newest = max(state["model"]["step"] for state in self.states)
        return bool(wait_for(lambda: min(state["model"]["step"] for state in self.states) > newest))

    def end(self) -> None:
        self._ranks.agent.request_hold(None)
        self._together.abort()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize(
    ("average", "order"),
    [(0, ["model", "average"]), (0, ["average", "model"]), (500, ["model", "average"])],
    ids=["one count", "in reverse", "counts of their own"],
)
def test_all_checkpointers_of_a_script_save_the_step_at_which_the_ranks_wait(
    ranks: RankThreads, average: int, order: list[str]
):
    running = Turns(ranks, 3, begins={"model": 0, "average": average}, order=order)
    try:
        assert running.continues()
        ranks.agent.request_hold(HoldRequest(number=1, generation=1, resizes=True))
        [answer] = wait_for(lambda: answers(ranks))
        assert not answer.problem
        step = answer.stored.checkpoint.step
        now = [{name: state["step"] for name, state in one.items()} for one in running.states]
        assert now == [{"model": step, "average": step + average}] * 3
        ranks.agent.request_hold(None)
        assert running.continues()
        assert len(answers(ranks)) == 1
    finally:
        running.end()


@pytest.mark.parametrize("order", [["model", "average"], ["average", "model"]], ids=["in turn", "in reverse"])
def test_all_checkpointers_of_a_script_store_the_step_at_which_the_ranks_wait(ranks: RankThreads, order: list[str]):
    running = Turns(ranks, 3, begins={"model": 0, "average": 0}, order=order)
    try:
        assert running.continues()
        request_stored(ranks)
        places = wait_for(lambda: found if len(found := stored(ranks)) == 2 else None)
        [step] = {state["model"]["step"] for state in running.states}
        assert places == {"model": step, "average": step}
        found = {one.stored.checkpoint.place: one.stored.beside for one in ranks.agent.of(CheckpointStored)}
        assert (found["model"], found["average"]) == (("average",), ("model",))
    finally:
        running.end()


def test_a_checkpointer_that_saves_no_more_is_not_waited_for(ranks: RankThreads):
    with training(ranks) as running:
        second = [ranks.another(rank, 3, name="ema") for rank in range(3)]
        ranks.each(lambda rank: second[rank].restore({"step": 0}))
        ranks.each(lambda rank: second[rank].save(1, {"step": 1}))
        assert running.continues()
        ranks.agent.request_hold(HoldRequest(number=1, generation=1))
        assert not wait_for(lambda: answers(ranks))[0].problem


def test_a_checkpointer_that_saves_seldom_is_not_waited_for(ranks: RankThreads):
    """A step later than the one that is stored would be lost."""
    ranks.prepare(2, name="model")
    average, link = [ranks.another(rank, 2, name="average") for rank in range(2)], find_storage()
    for name in (ranks.checkpointers, average):
        ranks.each(lambda rank, name=name: name[rank].restore({"step": 0}))
    for step in range(1, 8):
        if step == 6:
            request_stored(ranks)
            wait_for(lambda: link is not None and link.desired().get("hold") == 1)
        # Rank 0 is the last one to see the request, and chooses the step at once.
        for rank in (1, 0):
            ranks.checkpointers[rank].save(step, {"step": step})
        if step == 5:
            ranks.each(lambda rank: average[rank].save(5, {"step": 5}))
    ended = threading.Event()

    def train(rank: int) -> None:
        for step in itertools.count(8):
            if ended.is_set():
                return
            ranks.checkpointers[rank].save(step, {"step": step})

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert wait_for(lambda: ranks.agent.committed).checkpoint.step == 8
        assert [one.stored.checkpoint.step for one in answers(ranks)] == [8]
    finally:
        ended.set()
        ranks.agent.request_hold(None)
        for thread in threads:
            thread.join()


def test_the_state_that_would_be_lost_is_named_where_there_are_several(ranks: RankThreads):
    running = Turns(ranks, 2, begins={"model": 0, "average": 0}, order=["model", "average"])
    for rank, state in enumerate(running.states):
        state["model"]["expert"] = rank
    try:
        assert running.continues()
        ranks.agent.request_hold(HoldRequest(number=1, generation=1, resizes=True))
        [answer] = wait_for(lambda: answers(ranks))
        assert answer.problem.startswith("model: expert differs between ranks")
        assert running.continues()
    finally:
        running.end()


def test_a_rank_whose_store_has_ended_with_its_world_makes_no_step_before_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planned_hold, "LONGEST", 0.4)
    store = mock.create_autospec(Store, instance=True)
    store.check.side_effect = [True, RuntimeError("the connection is closed")]
    store.get.return_value = json.dumps({"leader": "state", "at": 2, "step": 4, "turn": ["state"]}).encode()
    link = mock.create_autospec(StorageLink, instance=True)
    link.desired.return_value = {"hold": 1, "hold_generation": 1}
    own = RankIdentity(
        rank=1, world_size=2, local_rank=1, local_world_size=2, generation=1, folder=tmp_path, store=("127.0.0.1", 1)
    )
    planned = planned_hold.PlannedHold(own, "state", store, link)
    hold = planned.due(4)
    assert hold is not None
    began = time.monotonic()
    complete = mock.create_autospec(Completeness, instance=True)
    planned.wait(
        hold,
        HeldState(
            step=4, saved=True, replicated=True, arena=Arena(tmp_path), each_rank=(), common=(), complete=complete
        ),
    )
    assert time.monotonic() - began >= 0.4
