"""Tests that what waits while no worker runs reaches the job in messages of bounded size, and that none is lost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.contract import GroupTransitions, RankStepTimes
from perdure.contract.transitions import AnyTransition, NodePace, NodeReady, NodeStepTimes
from perdure.workflows import transitions as transitions_module
from perdure.workflows.delivery import Delivery
from perdure.workflows.policy.facts.deduplication import accept
from perdure.workflows.policy.state.role import RoleState
from tests.workflows.batches import batch, run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RANKS = tuple(RankStepTimes(rank=rank, compute=0.123456, wait=0.0234567, rest=0.00345678) for rank in range(8))


def step_times(node: int, generation: int = 1) -> NodeStepTimes:
    return NodeStepTimes(rank=node, incarnation=1, time=NOW, generation=generation, ranks=RANKS)


def size(message: GroupTransitions) -> int:
    return len(message.model_dump_json())


def test_reports_of_half_an_hour_without_a_worker_are_one_of_each_node():
    transitions = batch()
    transitions.keep_only_newest_telemetry()
    for report in range(3_500):
        transitions.add(step_times(report % 128, generation=report))
    told: list[GroupTransitions] = []
    transitions.report_end()
    run(transitions, lambda message: told.append(message) or Delivery.TAKEN)
    [message] = told
    assert sorted(one.generation for one in message.transitions) == list(range(3_500 - 128, 3_500))
    assert message.wound_down


def test_a_run_that_began_without_it_splits_what_it_keeps():
    transitions = batch()
    for report in range(3_500):
        transitions.add(step_times(report % 128, generation=report))
    told: list[GroupTransitions] = []
    transitions.report_end()
    run(transitions, lambda message: told.append(message) or Delivery.TAKEN)
    assert len(told) > 1
    assert all(size(message) < 600 * 1024 for message in told)
    assert [one.generation for message in told for one in message.transitions] == list(range(3_500))
    assert [message.wound_down for message in told] == [False] * (len(told) - 1) + [True]


@given(
    reports=st.lists(st.tuples(st.sampled_from(["ready", "times", "pace"]), st.integers(0, 3)), max_size=40),
    answers=st.lists(st.sampled_from([Delivery.TAKEN, Delivery.FAILED]), max_size=20),
    arrived=st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_every_edge_arrives_once_and_the_newest_telemetry_last(
    reports: list[tuple[str, int]], answers: list[Delivery], arrived: list[bool]
):
    """A delivery that failed may have arrived; reports come between messages, and messages hold three of them."""
    kinds: dict[str, type[Any]] = {"ready": NodeReady, "times": NodeStepTimes, "pace": NodePace}
    made: list[AnyTransition] = [
        kinds[kind](rank=node, incarnation=1, time=NOW, generation=number, **({"step": 1.0} if kind == "pace" else {}))
        for number, (kind, node) in enumerate(reports)
    ]
    largest = 3 * max((len(one.model_dump_json()) for one in made), default=0)
    transitions, waiting = batch(), list(made)
    transitions.keep_only_newest_telemetry()
    role, received = RoleState(role="worker", nodes_min=4, nodes_max=4), list[AnyTransition]()
    replies, arrivals = iter(answers), iter(arrived)

    def report(count: int) -> None:
        for one in waiting[:count]:
            transitions.add(one)
        del waiting[:count]
        if not waiting:
            transitions.report_end()

    def take(message: GroupTransitions) -> Delivery:
        nonlocal role
        reply = next(replies, Delivery.TAKEN)
        if reply is Delivery.TAKEN or next(arrivals):
            role, new = accept(role, message)
            received.extend(new or ())
        report(5)
        return reply

    report(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transitions_module, "_LARGEST", largest)
        run(transitions, take)
    edges = [one for one in made if isinstance(one, NodeReady)]
    assert [one for one in received if isinstance(one, NodeReady)] == edges
    for kind in (NodeStepTimes, NodePace):
        newest = {one.rank: one for one in made if isinstance(one, kind)}
        assert {one.rank: one for one in received if isinstance(one, kind)} == newest
