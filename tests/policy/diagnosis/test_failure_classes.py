"""Tests that each failure class has one entry, and that every consumer of the table handles every class."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass
from perdure.contract.transitions import NodeLost
from perdure.workflows.policy.diagnosis.failures import FAILURE_CLASSES, VICTIMS, complete, precedence
from perdure.workflows.policy.repair.case import Case
from perdure.workflows.policy.repair.ladder import decide
from perdure.workflows.policy.state.node import NodeFailure
from perdure.workflows.policy.state.role import Interruption
from tests.policy.scenario import Scenario


def test_a_class_without_an_entry_is_refused_at_import():
    for failure in FailureClass:
        rest = {other: traits for other, traits in FAILURE_CLASSES.items() if other is not failure}
        with pytest.raises(LookupError, match=f"without an entry: {failure}$"):
            complete(rest)


def test_victims_speak_after_all_others():
    assert max(FailureClass, key=precedence) in VICTIMS
    assert sorted(FailureClass, key=precedence) == list(FAILURE_CLASSES)


def test_one_rank_speaks_for_its_node():
    places = [traits.among_ranks for traits in FAILURE_CLASSES.values() if traits.among_ranks < 100]
    assert sorted(places) == list(range(len(places)))
    assert len(places) >= 8


@pytest.mark.parametrize("failure", FailureClass)
def test_every_class_is_explained(failure: FailureClass):
    job = Scenario("2").running().transition(1, NodeLost)
    [incident] = job.state.incidents
    told = explanation(incident.model_copy(update={"failure": failure}), job="llama", flag=" -n team").plain
    assert FAILURE_CLASSES[failure].meaning in told
    assert "llama -n team" in told
    assert "{" not in told


@pytest.mark.parametrize("failure", FailureClass)
def test_every_class_leads_to_what_its_entry_says(failure: FailureClass):
    job = Scenario("2").running()
    reported = NodeFailure(rank=1, failure=failure, time=job.now, text="it failed")
    interruption = Interruption(since=job.now - timedelta(minutes=1), failures=(reported,))
    verdict = decide(Case(job.state, interruption, job.job, job.now))
    assert verdict.failure is failure
    traits = FAILURE_CLASSES[failure]
    if traits.stop is not None:
        assert verdict.rule == traits.stop.rule
        assert verdict.stop is not None
        assert verdict.stop.exit_code == traits.stop.exit_code
    if traits.give_up is not None and traits.give_up.at_once:
        assert verdict.replaced == {1}
        assert verdict.title.startswith(f"node 1 {traits.give_up.what}")
