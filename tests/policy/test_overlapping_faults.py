"""Golden tables of overlapping faults: each is an incident of its own, or is named by the one that it belongs to.

They are checked as `perdure explain` prints them.
"""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, IncidentView, JobPhase
from perdure.contract.transitions import NodeCommanded, NodeStepping, NodeUnreachable, NodeUnresponsive
from perdure.workflows.policy.facts.events import RestartRequested, ScaleRequested
from tests.policy.scenario import Scenario


def told(incident: IncidentView) -> dict[str, str]:
    """Returns the output of `perdure explain` by label, with the first line of each."""
    lines = explanation(incident, job="job", flag="").plain.splitlines()
    return {"TITLE": lines[0]} | {line[:6].strip(): line[6:] for line in lines[1:] if line[:6].strip()}


def accepted(job: Scenario, *ranks: int) -> Scenario:
    """Agents have the current world; nothing runs yet."""
    for rank in ranks:
        job.transition(rank, NodeCommanded, generation=job.generation)
    return job


def test_a_rank_killed_in_the_next_world_is_an_incident_of_its_own():
    job = Scenario("1:2").running().wait(10).lost(1).wait(3)
    accepted(job, 0).rank_killed(0)
    first, second = job.state.incidents
    assert (first.failure, first.culprit) == (FailureClass.NODE_LOST, 1)
    assert (second.failure, second.culprit) == (FailureClass.KILLED, 0)
    assert (first.generation_before, first.generation_after) == (1, 2)
    assert (second.generation_before, second.generation_after) == (2, 3)
    assert "cost 3.0 s until #2 began" in told(first)["TITLE"]
    assert "culprit: node 1; fair confidence: 1 piece of evidence from 1 source" in told(first)["MEANS"]
    assert told(first)["TOOK"].endswith("did not run again before #2 began")
    assert "culprit: node 0; fair confidence: 1 piece of evidence from 1 source" in told(second)["MEANS"]
    assert "node 1" not in told(second)["TITLE"]
    assert told(second)["TOOK"] == "noticed after 0.00 s, decided in 0.00 s"
    job.wait(2).steps()
    assert job.state.incidents[1].stepping_at == job.now
    assert job.state.incidents[0].stepping_at is None


def test_two_nodes_lost_one_after_the_other_are_two_incidents():
    job = Scenario("1:3").running().lost(2).wait(0.5)
    accepted(job, 0, 1).lost(1)
    assert [incident.culprit for incident in job.state.incidents] == [2, 1]


def test_two_ranks_killed_on_two_nodes_within_a_second_are_both_named():
    job = Scenario("2").running().rank_killed(0).wait(0.4).rank_killed(1, generation=1)
    [incident] = job.state.incidents
    assert (incident.culprit, incident.also_failed) == (0, (1,))
    assert (
        "culprit: node 0; also failed: node 1; fair confidence: 1 piece of evidence from 1 source"
        in told(incident)["MEANS"]
    )


def test_victims_are_no_culprits_and_raise_the_confidence():
    job = Scenario("2").running().rank_killed(0).peer_failed(1, generation=1)
    [incident] = job.state.incidents
    assert incident.also_failed == ()
    assert "culprit: node 0; high confidence: 2 pieces of evidence from 2 sources" in told(incident)["MEANS"]


def test_a_rank_killed_while_a_replacement_is_awaited_is_named():
    job = Scenario("2").running().lost(1).wait(10).rank_killed(0)
    [incident] = job.state.incidents
    assert (incident.failure, incident.culprit, incident.also_failed) == (FailureClass.NODE_LOST, 1, (0,))
    assert "decided in 0.00 s" in told(incident)["TOOK"], "the first decision stands"
    assert "also failed: node 0; fair confidence: 1 piece of evidence from 1 source" in told(incident)["MEANS"]


def test_a_torchrun_killed_during_the_repair_is_an_incident_of_its_own():
    job = Scenario("2").running().rank_killed(0).wait(0.3)
    accepted(job, 1).command_exited(1, None, 9)
    first, second = job.state.incidents
    assert (first.culprit, second.culprit) == (0, 1)
    assert second.failure is FailureClass.COMMAND_LOST


def test_a_node_found_dead_while_its_peers_restart_is_the_cause_of_what_they_reported():
    job = Scenario("2").running().peer_failed(0).wait(2)
    job.transition(1, NodeUnreachable).transition(1, NodeUnresponsive, generation=2, detail="not taken")
    [incident] = job.state.incidents
    assert (incident.failure, incident.culprit) == (FailureClass.NODE_UNRESPONSIVE, 1)


def test_a_failure_after_a_restart_that_a_user_asked_for_is_not_that_restart():
    job = Scenario("2").running().take(RestartRequested(reason="new config"))
    accepted(job, 0, 1).rank_killed(0)
    asked, failed = job.state.incidents
    assert asked.title == "restart requested by a user: new config"
    assert failed.culprit == 0


def test_a_rank_killed_while_another_world_is_sent_on_request_is_named():
    job = Scenario("2").running().take(RestartRequested(reason="new config")).rank_killed(1, generation=1)
    [incident] = job.state.incidents
    assert (incident.failure, incident.culprit, incident.also_failed) == (None, None, (1,))
    assert told(incident)["MEANS"] == "requested by a user; also failed: node 1"
    assert "rank 1 SIGKILL" in explanation(incident, job="job", flag="").plain


def test_a_rank_killed_while_its_world_grows_is_named():
    job = Scenario("2:3").ready(0, 1).wait(60).steps().ready(2).rank_killed(1, generation=1)
    [incident] = job.state.incidents
    assert (job.generation, incident.also_failed) == (2, (1,))
    assert told(incident)["MEANS"] == "the available nodes changed; also failed: node 1"


def test_ranks_that_lose_their_peers_while_their_world_grows_have_not_failed():
    job = Scenario("2:3").ready(0, 1).wait(60).steps().ready(2).peer_failed(1, generation=1)
    [incident] = job.state.incidents
    assert told(incident)["MEANS"] == "nothing failed: the available nodes changed"
    assert len(incident.evidence) == 1


def test_a_rank_killed_while_a_requested_world_waits_for_those_that_leave_is_named():
    job = Scenario("3", backend="local").running().take(ScaleRequested(minimum=2, maximum=2))
    job.rank_killed(0, generation=1)
    [incident] = job.state.incidents
    assert (job.generation, incident.also_failed) == (1, (0,))


_BEFORE = {
    "a rank is killed": lambda job: job.rank_killed(0),
    "a node is lost": lambda job: job.lost(0),
    "a restart is requested": lambda job: job.take(RestartRequested()),
    "it shrinks": lambda job: job.take(ScaleRequested(minimum=2, maximum=2)),
    "ranks lose a peer": lambda job: job.peer_failed(2),
    "nothing happens": lambda job: job,
}


@given(
    nodes=st.sampled_from(["3", "2:3"]),
    before=st.sampled_from(sorted(_BEFORE)),
    later=st.floats(0, 10),
    commanded=st.booleans(),
)
def test_a_killed_rank_is_shown_whatever_its_world_was_ended_by(nodes: str, before: str, later: float, commanded: bool):
    """Its agent reports it, late or in time, as of the world in which it happened."""
    job = Scenario(nodes).running()
    _BEFORE[before](job).wait(later)
    if commanded:
        accepted(job, *(rank for rank in job.state.world.members if job.node(rank).alive) if job.state.world else ())
    job.rank_killed(1, generation=1)
    shown = [(one.rank, one.text) for incident in job.state.incidents for one in incident.evidence]
    assert (1, "rank 1 SIGKILL") in shown


def test_reports_about_an_older_world_belong_to_the_incident_that_ended_it():
    job = Scenario("2").running().rank_killed(0).steps().wait(1).rank_killed(0).steps()
    job.peer_failed(1, generation=1)
    assert [len(incident.evidence) for incident in job.state.incidents] == [2, 1]


def test_a_program_without_steps_runs_and_each_kill_is_an_incident_with_its_own_time():
    job = Scenario("2").ready(0, 1).wait(5).runs()
    assert job.state.phase is JobPhase.RUNNING
    for kill in range(6):
        job.wait(9).rank_killed(kill % 2).wait(2).runs()
        incident = job.state.incidents[-1]
        assert (incident.number, incident.running_at, incident.stepping_at) == (kill + 1, job.now, None)
        assert "cost 2.0 s" in told(incident)["TITLE"]
        assert told(incident)["TOOK"].endswith("its ranks run, and no step was seen yet")
    assert len(job.state.incidents) == 6


def test_the_first_step_is_told_when_it_is_seen_and_not_before():
    job = Scenario("2").running().rank_killed(0).wait(3).runs().wait(60)
    assert "first step" not in told(job.state.incidents[-1])["TOOK"]
    entered, _ = job.now - timedelta(seconds=60), job.wait(47)
    for rank in (0, 1):
        job.transition(rank, NodeStepping, generation=2, entered_at=entered)
    [incident] = job.state.incidents
    assert incident.stepping_at == job.now == incident.started_at + timedelta(seconds=110)
    assert "cost 1m 50s" in told(incident)["TITLE"]
    assert "first step in 1m 47s" in told(incident)["TOOK"]


def test_a_node_that_answers_no_command_is_not_called_lost_with_another_one():
    job = Scenario("2").running().rank_killed(0).wait(4)
    job.transition(0, NodeUnresponsive, generation=2, detail="not taken").wait(1).lost(1)
    [incident] = job.state.incidents
    assert incident.title.startswith("node 1 lost, node 0 unresponsive while its world is stopped")
