"""States that a script saves in turn, each with a checkpointer: they continue from one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from perdure.contract import CheckpointRestored
from perdure_training.checkpoint import Checkpointer
from perdure_training.checkpoint.save_turns import SaveTurns
from tests.support.waiting import wait_for
from tests.training.ranks_in_threads import RankThreads, rank_threads

RANKS = 3


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path) as ranks:
        yield ranks


class States:
    """The states of one script, by the names of their checkpointers."""

    def __init__(self, ranks: RankThreads, names: Sequence[str]) -> None:
        self._ranks = ranks
        self._names = names
        self._checkpointers: dict[str, list[Checkpointer]] = {}

    def begin(self) -> dict[str, list[int | None]]:
        """Begins the next generation; returns the steps that the ranks have restored."""
        self.close()
        first, *others = self._names
        self._ranks.prepare(RANKS, name=first, copies=0)
        self._checkpointers = {first: self._ranks.checkpointers}
        for name in others:
            self._checkpointers[name] = [
                self._ranks.another(rank, RANKS, name=name, replicated=name == "average") for rank in range(RANKS)
            ]
        return {name: self._restore(name) for name in self._names}

    def close(self) -> None:
        """Ends the checkpointers, as the end of their process does."""
        for checkpointers in self._checkpointers.values():
            for checkpointer in checkpointers:
                checkpointer.close()

    def _restore(self, name: str) -> list[int | None]:
        return self._ranks.each(lambda rank: self._checkpointers[name][rank].restore({"step": 0, "value": 0}))

    def save(self, name: str, step: int) -> None:
        checkpointers = self._checkpointers[name]
        self._ranks.each(lambda rank: checkpointers[rank].save(step, {"step": step, "value": rank}))
        for checkpointer in checkpointers:
            checkpointer.flush()


def test_states_that_count_alike_continue_from_the_newest_step_that_all_of_them_have(ranks: RankThreads):
    states = States(ranks, ["model", "average"])
    assert states.begin() == {"model": [None] * RANKS, "average": [None] * RANKS}
    for step in range(1, 4):
        states.save("model", step)
        states.save("average", step)
    # The ranks are killed between two saves.
    states.save("model", 4)
    assert states.begin() == {"model": [3] * RANKS, "average": [3] * RANKS}
    states.save("model", 4)
    states.save("average", 4)
    assert states.begin() == {"model": [4] * RANKS, "average": [4] * RANKS}


def test_states_that_count_apart_continue_each_from_its_newest_step(ranks: RankThreads):
    states = States(ranks, ["model", "buffer"])
    states.begin()
    for step in range(1, 4):
        states.save("model", step)
        states.save("buffer", 10 * step)
    states.save("model", 4)
    assert states.begin() == {"model": [4] * RANKS, "buffer": [30] * RANKS}


def test_one_after_another_is_not_in_turn(ranks: RankThreads):
    states = States(ranks, ["fold-1", "fold-2"])
    states.begin()
    for name, last in (("fold-1", 3), ("fold-2", 4)):
        for step in range(1, last + 1):
            states.save(name, step)
    assert states.begin() == {"fold-1": [3] * RANKS, "fold-2": [4] * RANKS}


def test_the_job_learns_that_no_step_is_left_that_all_have(ranks: RankThreads, caplog: pytest.LogCaptureFixture):
    states = States(ranks, ["model", "average"])
    states.begin()
    for step in range(1, 4):
        states.save("model", step)
        states.save("average", step)
    for path in ranks.memory.glob("stage-0/average/*"):
        path.unlink()
    assert states.begin() == {"model": [3] * RANKS, "average": [None] * RANKS}
    text = "the checkpointer 'average' begins anew, and 'model' continues from step 3"
    assert text in caplog.text
    reports = wait_for(lambda: [one for one in ranks.agent.of(CheckpointRestored) if one.restored.apart])
    assert reports[0].restored.apart.startswith(text)


def test_checkpointers_count_alike_once_they_have_saved_two_steps_in_turn_and_until_they_do_not():
    turns = SaveTurns()
    for name in ("model", "average", "buffer"):
        turns.add(name)
    seen = [(turns.record(name, step), sorted(turns.of_one_count)) for step in (1, 2) for name in ("model", "average")]
    assert seen == [(False, []), (False, []), (False, []), (True, ["average", "model"])]
    assert not turns.record("buffer", 40)
    assert [turns.record("model", 3), turns.record("model", 4)] == [False, True]
    assert not turns.of_one_count


@pytest.mark.parametrize(
    ("created", "saves", "turn"),
    [
        (["model"], ["model"], ["model"]),
        (["model", "average"], ["model", "average", "model"], ["average", "model"]),
        (["model", "average"], ["average", "model", "average", "model"], ["average", "model"]),
        (["model", "average"], ["model", "average", "model", "average"], []),
        (["model", "average"], ["model", "model", "average", "model"], ["model"]),
        (["model", "average"], ["model", "average", "model", "model"], ["model"]),
        (["average", "model"], ["model", "model", "average", "model"], ["model"]),
        (["average", "model"], ["average", "model", "model", "average", "model", "model", "average"], []),
        (["model", "average"], ["model"], []),
    ],
)
def test_those_save_in_turn_that_save_each_time(created: list[str], saves: list[str], turn: list[str]):
    turns = SaveTurns()
    for name in created:
        turns.add(name)
    for step, name in enumerate(saves):
        turns.record(name, step)
    assert sorted(turns.turn_of(saves[-1])) == turn
