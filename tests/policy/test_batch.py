"""Tests of events that cannot be decided on: they are skipped, counted and shown; a job that cannot decide reports
that."""

from __future__ import annotations

from datetime import datetime
from uuid import uuid4

import pytest

from perdure.contract.transitions import NodeLost
from perdure.workflows.policy.decide import decide_all
from perdure.workflows.policy.facts.events import Event
from perdure.workflows.policy.record.projections import warnings_of
from perdure.workflows.policy.state.job import JobState
from tests.policy.scenario import START, Scenario


def lost(rank: int, time: datetime = START) -> NodeLost:
    return NodeLost(rank=rank, incarnation=1, time=time)


def malformed(rank: int) -> NodeLost:
    """Times are checked where messages are read; this one was not."""
    return lost(rank).model_copy(update={"time": datetime(2026, 1, 1)})  # noqa: DTZ001


def taken(scenario: Scenario, *events: Event) -> tuple[JobState, list[str]]:
    dropped: list[str] = []
    state = decide_all(scenario.whole, events, scenario.job, scenario.now, new_token=uuid4, dropped=dropped.append)
    return state, dropped


def test_other_events_are_taken_and_the_status_says_what_was_left_out():
    scenario = Scenario("3").running()
    state, dropped = taken(scenario, lost(0), malformed(1), lost(2))
    assert [node.incarnation for _, node in sorted(state.view().nodes.items())] == [2, 1, 2]
    assert len(dropped) == state.dropped_events == 1
    assert "NodeLost: TypeError" in dropped[0]
    assert warnings_of(state.view(), scenario.job)[0].startswith("1 messages could not be processed")


def test_a_job_that_cannot_decide_without_any_event_raises():
    scenario = Scenario("2").running()
    scenario.state = scenario.state.replace(nodes_max="two")
    with pytest.raises(TypeError):
        taken(scenario, lost(0))
