"""Tests of how a node follows what its group desires of it, whatever it has missed and in whatever order it arrives."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from perdure.contract import ApplyDesired, NodeDesired, StopRequest
from tests.agent.bench import IDENTITY, Bench
from tests.support.desired import desired_world

STOP = StopRequest(reason="scaled down", grace=timedelta(seconds=5))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_node_that_missed_three_desired_states_lacks_nothing_with_the_fourth(bench: Bench) -> None:
    bench.apply(1)
    bench.enter(1)
    bench.exit(generation=1, code=0)
    bench.desires.next(complete_generation=1, stages_complete=1)
    bench.desires.next(command_restarts=1)
    bench.desires.next(world=desired_world(IDENTITY, 2, stage=1))
    reached = bench.desire(world=desired_world(IDENTITY, 3, stage=1), inquiry=1)
    state = bench.node.state
    assert (reached.accepted, reached.version, reached.generation) == (True, 5, 3)
    assert (state.complete, state.stages_complete, state.command_restarts) == (1, 1, 1)
    assert (state.run, state.attempt) == (True, 2), "its command is started again, once"
    assert state.desired.stop_generation == 2


def test_a_desired_state_that_arrives_twice_changes_nothing_the_second_time(bench: Bench) -> None:
    bench.apply(1)
    bench.exit(generation=1, code=1)
    command = bench.desires.next(world=desired_world(IDENTITY, 2), command_restarts=1, stop=STOP)
    reached = bench.node.apply_desired(command)
    state, messages = bench.node.state, list(bench.job.messages)
    assert state.attempt == 2
    assert bench.node.apply_desired(command).model_copy(update={"accepted": True, "detail": ""}) == (
        reached.model_copy(update={"accepted": True, "detail": ""})
    )
    assert (bench.node.state, bench.job.messages) == (state, messages)


def test_an_older_desired_state_is_ignored_and_the_answer_names_the_newest(bench: Bench) -> None:
    older = bench.desires.next(world=desired_world(IDENTITY, 1), command_restarts=3, stop=STOP)
    bench.desire(world=desired_world(IDENTITY, 2), command_restarts=0, stop=None)
    state = bench.node.state
    reached = bench.node.apply_desired(older)
    assert (reached.accepted, reached.version, reached.generation) == (False, 2, 2)
    assert bench.node.state == state


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"incarnation": 1}, id="another incarnation"),
        pytest.param({"token": "guessed"}, id="another token"),
        pytest.param({"rank": 9}, id="another node"),
    ],
)
def test_a_desired_state_of_another_incarnation_is_refused_and_tells_nothing(
    bench: Bench, other: dict[str, object]
) -> None:
    bench.apply(1)
    state = bench.node.state
    node = IDENTITY.model_copy(update=other)
    desired = NodeDesired(world=desired_world(node, 2), complete_generation=1, stop=STOP)
    reached = bench.node.apply_desired(ApplyDesired(node=node, version=99, desired=desired))
    assert (reached.accepted, reached.version, reached.generation) == (False, 0, 0)
    assert bench.node.state == state


def test_an_agent_that_starts_again_ignores_what_it_had_passed_before(bench: Bench) -> None:
    older = bench.desires.next(stop=STOP)
    bench.desire(world=desired_world(IDENTITY, 1), stop=None)
    bench.start()
    assert bench.node.apply_desired(older).version == 2
    assert bench.node.state.leaving is None


def test_only_a_shorter_grace_period_changes_a_stop(bench: Bench) -> None:
    bench.desire(stop=STOP)
    bench.desire(stop=STOP.model_copy(update={"grace": timedelta(seconds=60)}))
    assert bench.node.state.leaving_grace == 5
    bench.desire(stop=STOP.model_copy(update={"grace": timedelta(seconds=1)}))
    assert (bench.node.state.leaving, bench.node.state.leaving_grace) == ("scaled down", 1)
