"""Tests of the agent's part in replays for users: the request to the ranks, and what it makes of their answers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.agent.checks import Checker
from perdure.agent.replays import replay
from perdure.contract import CheckKind, CheckNode
from perdure_training.node_api.bodies import HandlerHello
from perdure_training.node_api.corruption_file import GRADIENTS
from perdure_training.node_api.replay_files import ReplayAnswer, answer_path, read_answer, read_request, write_answer
from tests.agent.bench import IDENTITY, Bench
from tests.support.waiting import DEADLINE

ANSWERED = ReplayAnswer(request=7, step=1200, compared=GRADIENTS, checksum="00000000000000a1", seconds=0.25)


@pytest.fixture
def node(tmp_path: Path) -> Bench:
    """A node with two ranks, in generation 1."""
    bench = Bench(tmp_path)
    bench.node.on_handler_hello(HandlerHello(pid=1, min_nodes=2, max_nodes=4, processes=2))
    bench.apply(1)
    bench.enter(1)
    return bench


def first_rank(node: Bench) -> int:
    world = node.node.state.world
    assert world is not None
    return world.base_rank


def answer(node: Bench, local_rank: int, found: ReplayAnswer, *, generation: int = 1) -> None:
    path = answer_path(node.config.run_dir / "progress", first_rank(node) + local_rank)
    write_answer(path, found, generation=generation)


async def test_each_rank_answers_with_what_it_has_compared(node: Bench):
    answer(node, 0, ReplayAnswer())
    answer(node, 1, ReplayAnswer())
    question = CheckNode(
        uid=IDENTITY.uid,
        role=IDENTITY.role,
        rank=IDENTITY.rank,
        incarnation=IDENTITY.incarnation,
        kind=CheckKind.REPLAY,
        request=7,
    )
    asked = asyncio.create_task(Checker(node.node).answer(question, handed_out=datetime.now(UTC)))
    async with asyncio.timeout(DEADLINE):
        while not read_request(node.config.run_dir, generation=1):
            await asyncio.sleep(0)
    assert read_request(node.config.run_dir, generation=1) == 7
    assert read_request(node.config.run_dir, generation=2) == 0, "another world has not been asked"
    answer(node, 0, ANSWERED)
    answer(node, 1, ReplayAnswer(request=7, step=1200, problem="the gradients are not the same: a1 and b2"))
    first, second = (await asked).checks
    rank = first_rank(node)
    assert (first.subject, first.checksum) == (f"rank {rank}, gradients of step 1,200", "00000000000000a1")
    assert (first.problem, first.seconds) == ("", 0.25)
    assert (second.subject, second.problem) == (f"rank {rank + 1}", "the gradients are not the same: a1 and b2")


async def test_a_script_that_cannot_replay_steps_is_told_at_once(node: Bench):
    answer(node, 0, ANSWERED, generation=0)
    (found,) = await replay(node.node, 7)
    assert found.problem == "the script replays no steps: docs/corruption.md says how it can"


async def test_a_rank_that_replays_no_more_has_said_why_and_one_that_is_late_is_named(node: Bench):
    answer(node, 0, ReplayAnswer(problem="the step is not deterministic"))
    answer(node, 1, ReplayAnswer())
    first, second = await replay(node.node, 7, within=0.1)
    assert first.problem == "the step is not deterministic"
    assert second.problem == "no step was replayed within 0.1 s: `perdure status` shows whether ranks step"


async def test_without_a_world_nothing_is_asked(tmp_path: Path):
    (found,) = await replay(Bench(tmp_path).node, 7)
    assert found.problem == "the node trains in no world now"


@pytest.mark.parametrize("wrong", ["[", "{}", '{"generation": 1, "answer": {"request": -1, "step": 0}}'])
def test_a_malformed_answer_is_none(tmp_path: Path, wrong: str):
    path = answer_path(tmp_path, 0)
    path.write_text(wrong)
    assert read_answer(path, generation=1, beneath=tmp_path) is None
