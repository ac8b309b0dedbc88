"""Tests that an incident has what was done as data, and that its sentence is made of that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from perdure.contract import (
    Action,
    AwaitNodes,
    ExtendFirstStep,
    IncidentView,
    NewWorld,
    ReplaceNodes,
    RestartCommands,
    RestartRanks,
    Shrink,
    Stop,
    Suspend,
)
from perdure.contract.transitions import NodeStalled
from perdure.workflows.policy.facts.events import ScaleRequested, SuspendRequested
from perdure.workflows.policy.record.action_words import words
from perdure.workflows.policy.record.incident_texts import within_budget
from tests.policy.scenario import START, Scenario
from tests.workflows.large import long_incident


def without_a_first_step() -> Scenario:
    job = Scenario("1", timing={"stall": {"first_step": "20m"}}).ready(0).runs()
    return job.transition(0, NodeStalled, generation=1, at_start=True).wait(60)


@pytest.mark.parametrize(
    ("interrupt", "actions"),
    [
        (lambda: Scenario("2").running().rank_killed(1), (RestartRanks(nodes=(1,)),)),
        (
            lambda: Scenario("2").running().lost(1),
            (ReplaceNodes(nodes=(1,)), AwaitNodes(patience=timedelta(minutes=10))),
        ),
        (lambda: Scenario("1:2").running().lost(1), (Shrink(size=1, survivors=1), ReplaceNodes(nodes=(1,)))),
        (
            lambda: Scenario("2").ready(0, 1).steps(0).misses_its_world(1),
            (RestartCommands(nodes=(1,)), RestartRanks(others=True)),
        ),
        (without_a_first_step, (RestartRanks(), ExtendFirstStep())),
        (lambda: Scenario("2").running().take(SuspendRequested(reason="night")), (Suspend(),)),
        (
            lambda: Scenario("1:2").running().lost(1).steps().ready(1),
            (NewWorld(reason="world grows from 1 to 2 nodes"),),
        ),
    ],
)
def test_an_incident_has_what_was_done_as_data(interrupt: Callable[[], Scenario], actions: tuple[Action, ...]):
    job = interrupt()
    assert job.incident.actions == actions
    assert job.incident.action == words(actions)


def test_programs_read_kinds_and_nodes():
    job = Scenario("2").running().lost(1)
    replace, wait = job.incident.model_dump(mode="json")["actions"]
    assert (replace["kind"], replace["nodes"]) == ("REPLACE_NODES", [1])
    assert (wait["kind"], wait["nodes"], wait["patience"]) == ("AWAIT_NODES", [], "10m")
    assert IncidentView.model_validate_json(job.incident.model_dump_json()) == job.incident


def test_a_job_that_stops_records_the_stop_that_ends_it():
    job = Scenario("2", recovery={"on_capacity_loss": "fail"}).running().lost(1)
    assert job.state.outcome is not None
    assert job.incident.actions == (Stop(reason=job.state.outcome.reason, exit_code=3),)
    assert job.incident.stopped


def test_what_a_request_does_during_a_repair_is_added():
    job = Scenario("2").running().lost(1).take(SuspendRequested(reason="night"))
    [lost, suspended] = job.state.incidents
    assert lost.actions[0] == ReplaceNodes(nodes=(1,))
    assert suspended.actions == (Suspend(),)


def test_an_incident_that_ends_before_a_decision_did_nothing():
    job = Scenario("2").running().peer_failed(0)
    job.take(SuspendRequested(reason="night"))
    assert job.state.incidents[0].actions == ()
    assert job.state.incidents[0].action == "suspended by a user: night"


def test_an_older_incident_whose_texts_are_shortened_keeps_no_actions():
    told = tuple(
        long_incident(number).model_copy(update={"actions": (ReplaceNodes(nodes=tuple(range(1_000))),)})
        for number in range(1, 51)
    )
    first, *_, last = within_budget(told)
    assert (first.actions, first.left_out != "") == ((), True)
    assert last == told[-1]


def test_a_scaled_job_records_the_new_world():
    job = Scenario("3").running().take(ScaleRequested(minimum=2, maximum=2)).those_that_leave_end()
    [action] = job.incident.actions
    assert isinstance(action, NewWorld)
    assert job.incident.action == f"new generation: {action.reason}"


def test_a_node_whose_clock_is_ahead_reports_nothing_of_the_future():
    job = Scenario("2").running().rank_killed(1, time=START + timedelta(seconds=90))
    incident = job.incident
    assert (incident.started_at, [one.time for one in incident.evidence]) == (job.now, [job.now])
    assert job.steps().incident.over_at == job.now


@pytest.mark.parametrize("fail", [Scenario.rank_killed, Scenario.lost])
def test_an_incident_names_the_machine_on_which_it_began(fail: Callable[[Scenario, int], Scenario]):
    job = fail(Scenario("2").running(), 1)
    assert (job.incident.culprit, job.incident.host) == (1, "host-1")
    # Its replacement runs elsewhere; what follows is the same incident.
    job.ready(*job.incarnations, after=1).steps(*job.incarnations)
    assert job.incident.host == "host-1"


def test_a_request_began_on_no_machine():
    assert Scenario("2").running().take(SuspendRequested(reason="night")).incident.host == ""
