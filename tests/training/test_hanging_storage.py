"""A storage that begins to hang while checkpoints are stored: the job learns of it; they are stored once it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.agent.checkpoint import answering_storage, stalled_writes
from perdure.agent.checkpoint.storage import Storage
from perdure_training.node_api.storage_link import StorageAway, StorageLink
from tests.support.waiting import DEADLINE, wait_for
from tests.training.ranks_in_threads import RankThreads, rank_threads

RANKS = 2


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankThreads]:
    with rank_threads(tmp_path) as ranks:
        yield ranks


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The server of a network file system, which answers while it is set."""
    answers = threading.Event()
    answers.set()
    monkeypatch.setattr(stalled_writes, "WITHIN", 0.2)
    monkeypatch.setattr(answering_storage, "_WITHIN", 0.2)

    def hanging(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            answers.wait(DEADLINE)
            return method(*arguments, **named)

        return call

    for name in ("names", "sizes", "size", "read", "write", "is_committed"):
        monkeypatch.setattr(Storage, name, hanging(getattr(Storage, name)))
    yield answers
    answers.set()


def test_a_checkpoint_that_the_storage_does_not_take_is_reported_and_stored_when_it_answers(
    ranks: RankThreads, server: threading.Event
):
    states = [{"step": 1, "value": rank} for rank in range(RANKS)]
    ranks.begin(states)
    server.clear()
    ranks.save(1, states, durable=True)
    [problem, *_] = wait_for(lambda: ranks.agent.problems)
    assert f"{ranks.storage} hangs: it takes nothing of what is stored" in problem
    asked = {"request": "await", "folder": f"step-1-run-{ranks.agent.generation}", "within": 0}
    answer = StorageLink(ranks.agent.run_dir).insist(asked, patience=DEADLINE)
    assert not answer["committed"]
    assert "hangs" in answer["delayed_by"]
    server.set()
    assert ranks.wait_until_durable(DEADLINE) == [True] * RANKS
    assert ranks.steps == [1]


def test_what_a_script_has_saved_is_not_waited_for_in_silence(ranks: RankThreads, server: threading.Event):
    server.clear()
    with pytest.raises(StorageAway, match="hangs"):
        StorageLink(ranks.agent.run_dir).read({"request": "watched", "do": "choose"}, patience=0.0)
