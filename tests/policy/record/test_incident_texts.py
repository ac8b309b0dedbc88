"""Tests that incidents stay within a budget of text: the newest in full, the oldest shortened first."""

from __future__ import annotations

import pytest

from perdure.contract import IncidentView
from perdure.workflows.policy.record.incident_texts import BUDGET, within_budget
from perdure.workflows.policy.record.incidents import KEPT_INCIDENTS
from tests.policy.scenario import Scenario
from tests.workflows.large import LONG, long_incident

ANSWER = 512 * 1024
"""From this size of a query's answer on the server warns."""


def size(incidents: tuple[IncidentView, ...]) -> int:
    return sum(len(incident.model_dump_json().encode()) for incident in incidents)


@pytest.mark.parametrize("text", ["a connection was reset by a peer; ", LONG, "🦀" * 30, "\x1b" * 30])
def test_the_longest_incidents_fit_into_one_answer(text: str):
    told = (long_incident(1, text),)
    for number in range(1, KEPT_INCIDENTS):
        told = within_budget((*told, long_incident(number + 1, text)))
    assert size(told) < ANSWER
    assert told[-1] == long_incident(KEPT_INCIDENTS, text)
    assert [incident.number for incident in told] == list(range(1, KEPT_INCIDENTS + 1))
    assert "21 pieces of its evidence left out" in told[0].left_out
    assert within_budget(told) == told


def test_incidents_within_the_budget_are_kept_as_they_are():
    told = tuple(long_incident(number + 1, "short") for number in range(20))
    assert size(told) < BUDGET
    assert within_budget(told) == told


def test_a_job_whose_ranks_print_long_errors_again_and_again_keeps_within_the_budget():
    job = Scenario("2", retry={"max_restarts": 1000, "no_progress_limit": 1000}).running()
    for _ in range(KEPT_INCIDENTS):
        job.rank_raised(0, LONG * 200, log_tail=LONG * 200)
        job.ready(0, 1, after=job.generation).wait(600).steps()
    assert len(job.state.incidents) == KEPT_INCIDENTS
    assert size(job.state.incidents) < ANSWER
