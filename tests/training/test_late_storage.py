"""An agent that is away when a world begins: its checkpoints are stored once it answers, by all ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from perdure.contract import RestoreSource
from perdure_training.checkpoint import generation_storage
from perdure_training.checkpoint.world import RankIdentity
from tests.support.waiting import wait_for
from tests.training.ranks_in_threads import RankThreads, rank_threads

WITHIN = 60.0
RANKS = 2


def states(step: int = 0) -> list[dict[str, Any]]:
    return [{"weights": torch.full((200,), float(step)), "step": step} for _ in range(RANKS)]


def end_agent(ranks: RankThreads) -> None:
    """The agent ends; its socket's file stays."""
    for socket in ranks.agent._sockets:
        socket.close()


def save(ranks: RankThreads, step: int, **arguments: Any) -> None:
    assert ranks.save(step, states(step), **arguments) == [True] * RANKS
    for checkpointer in ranks.checkpointers:
        checkpointer.flush()


def test_an_agent_that_answers_later_stores_the_checkpoints_of_the_world_that_began_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(generation_storage, "_AGENT_PATIENCE", 0.1)
    with rank_threads(tmp_path, keep_last=5) as ranks:
        ranks.begin(states())
        save(ranks, 1)
        end_agent(ranks)
        assert ranks.begin(states()) == [1] * RANKS
        save(ranks, 2, durable=True)
        assert ranks.wait_until_durable(0.1) == [False] * RANKS
        ranks.agent.start()
        [report] = wait_for(lambda: ranks.agent.restores)
        assert (report.step, report.source) == (1, RestoreSource.MEMORY)
        step = 2

        def stored() -> bool:
            nonlocal step
            step += 1
            save(ranks, step, durable=True)
            return ranks.wait_until_durable(1.0) == [True] * RANKS

        wait_for(stored)
        step += 1
        save(ranks, step, durable=True)
        assert ranks.wait_until_durable(WITHIN) == [True] * RANKS
        assert ranks.steps[0] == step


def test_the_job_learns_with_what_ranks_continue_where_the_agent_of_another_node_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reach = generation_storage.connect_storage

    def connect(own: RankIdentity, *arguments: Any, again: bool = False, **facts: Any) -> Any:
        return reach(own, *arguments, again=again, **facts) if again or own.rank == 0 else None

    with rank_threads(tmp_path, keep_last=5) as ranks:
        ranks.begin(states())
        save(ranks, 1)
        monkeypatch.setattr(generation_storage, "connect_storage", connect)
        assert ranks.begin(states()) == [1] * RANKS
        [report] = wait_for(lambda: ranks.agent.restores)
        assert (report.step, report.source) == (1, RestoreSource.MEMORY)
