"""Tests of what a job does about ranks that hang, and of what it tells of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import (
    FailureClass,
    HangKind,
    JobPhase,
    NodePhase,
)
from perdure.contract.transitions import NodeStalled, NodeStallEnded, NodeStallLook, NodeUnreachable
from tests.policy.diagnosis.stalled_ranks import (
    BARRIER,
    EVALUATION,
    IN_KERNEL,
    LOADER,
    LOCK,
    LOOP,
    STOPPED,
    WAITS,
    call,
    computes,
    found,
    look,
    sleeps,
)
from tests.policy.scenario import Scenario, reported


def seen(job: Scenario, *ranks: dict[str, Any], **fields: Any) -> Scenario:
    """All nodes stall, and report where their only rank is."""
    assert job.state.world is not None
    generation = job.generation
    for node, member in sorted(job.state.world.members.items()):
        told = {"generation": generation, "taken_at": job.now, **fields}
        job.transition(node, NodeStalled, generation=generation)
        shown = look(ranks[node], first=member.base_rank, **told)
        job.transition(node, NodeStallLook, generation=generation, look=shown)
    return job


def told(job: Scenario) -> str:
    return explanation(job.incident, job="llama", flag="").plain


def test_a_rank_that_hangs_is_restarted_in_place_and_the_story_names_it():
    job = Scenario("3").running()
    seen(job, WAITS, sleeps(LOCK), WAITS, progress=reported(120))
    assert job.generation == 2
    assert job.incarnations == {0: 1, 1: 1, 2: 1}
    incident = job.incident
    assert (incident.failure, incident.culprit, incident.step_before) == (FailureClass.RANK_HANG, 1, 120)
    assert incident.hang is not None
    assert (incident.hang.kind, incident.hang.ranks) == (HangKind.ASLEEP, (1,))
    text = told(job)
    assert "rank 1 of node 1 sleeps outside of any collective, in exchange, /job/train.py:12" in text
    assert "ranks 0, 2 wait in all_reduce, main, /job/train.py:26" in text
    assert "culprit: node 1; high confidence: 2 independent signs agree" in text
    assert 'rule hang/1 "a rank hangs: restart in place"' in text
    assert "      exchange  /job/train.py:12" in text
    assert all(node.look is None for node in job.state.nodes.values())


def test_an_incident_begins_with_the_last_step_although_no_stall_was_reported():
    job = Scenario("2").running()
    last = job.now
    job.wait(timedelta(seconds=15))
    ranks = ({**WAITS, "collectives": (call(57),)}, {**sleeps(BARRIER), "collectives": (call(57, name="barrier"),)})
    for node, rank in enumerate(ranks):
        seen = look(rank, first=node, early=True, since=last, taken_at=job.now)
        job.transition(node, NodeStallLook, generation=1, look=seen)
    assert (job.incident.started_at, job.incident.noticed_at) == (last, last + timedelta(seconds=15))
    assert [one.text for one in job.incident.evidence][:2] == [
        f"node {node} stepped for the last time" for node in range(2)
    ]


def test_a_stopped_rank_is_restarted_before_the_other_nodes_have_said_anything():
    job = Scenario("3").running()
    job.transition(1, NodeStallLook, generation=1, look=look(STOPPED, first=1, early=True, taken_at=job.now))
    assert job.generation == 2
    assert job.incident.hang is not None
    assert job.incident.hang.kind is HangKind.STOPPED


@pytest.mark.parametrize(
    "ranks",
    [[WAITS, sleeps(EVALUATION), WAITS], [WAITS, WAITS, WAITS], [computes(LOOP), computes(LOOP), computes(LOOP)]],
)
def test_what_may_be_work_is_shown_and_left_alone(ranks: list[dict[str, Any]]):
    job = seen(Scenario("3").running(), *ranks)
    job.wait(timedelta(days=1))
    assert (job.generation, job.state.incidents) == (1, ())
    assert job.state.phase is JobPhase.RUNNING


def test_what_was_seen_is_in_the_status_and_in_the_observation_of_the_pause():
    job = seen(Scenario("2").running(), WAITS, sleeps(EVALUATION))
    text = "rank 1 of node 1 does something else, in sleep_like, /job/train.py:3"
    assert text in job.state.reason
    job.wait(100)
    for node in range(2):
        job.transition(node, NodeStallEnded, generation=1)
    assert job.incident.observation is not None
    assert [one.text for one in job.incident.evidence if text in one.text] == [
        f"{text}; rank 0 waits in all_reduce, main, /job/train.py:26"
    ]
    assert text not in job.state.reason


def unusual(job: Scenario, *ranks: dict[str, Any]) -> Scenario:
    """Each node has one rank, and tells where it is before there is a stall."""
    since = job.now - timedelta(seconds=15)
    for node, rank in enumerate(ranks):
        told = look(rank, first=node, since=since, taken_at=job.now, unusual=True, long=False)
        job.transition(node, NodeStallLook, generation=1, look=told)
    return job


def test_a_hang_that_no_work_explains_is_repaired_before_there_is_a_stall():
    job = unusual(Scenario("3").running(), WAITS, sleeps(BARRIER), WAITS)
    assert (job.generation, job.incident.culprit) == (2, 1)
    assert job.incident.hang is not None
    assert job.incident.hang.kind is HangKind.MISMATCH


def test_a_loader_that_waits_for_one_item_is_left_alone_until_no_pause_is_as_long():
    job = unusual(Scenario("3").running(), WAITS, sleeps(LOADER), WAITS)
    assert (job.generation, job.state.incidents) == (1, ())
    hang = found(WAITS, sleeps(LOADER, moved=True), WAITS)
    assert hang is not None
    assert (hang.kind, hang.ranks, len(hang.signs)) == (HangKind.DATA_LOADER, (1,), 2)


def test_work_in_an_unusual_pause_is_no_entry_and_not_in_the_status():
    job = unusual(Scenario("3").running(), WAITS, sleeps(EVALUATION), WAITS)
    assert (job.generation, job.state.incidents) == (1, ())
    assert "does something else" not in job.state.reason


def test_a_job_that_only_reports_hangs_does_nothing_about_them():
    job = seen(Scenario("2", recovery={"on_hang": "report"}).running(), WAITS, sleeps(LOCK))
    assert job.generation == 1
    assert "rank 1 of node 1 sleeps outside of any collective" in job.state.reason


def test_ranks_that_step_again_before_all_nodes_were_seen_are_left_alone():
    job = Scenario("2").running()
    for node in range(2):
        job.transition(node, NodeStalled, generation=1)
    job.transition(0, NodeStallLook, generation=1, look=look(WAITS, taken_at=job.now))
    job.transition(0, NodeStallEnded, generation=1)
    job.transition(1, NodeStallLook, generation=1, look=look(sleeps(LOCK), first=1, taken_at=job.now))
    assert job.generation == 1


def test_looks_that_come_late_are_not_acted_on():
    """They were held up by an outage of the control plane, and say nothing of now."""
    job = Scenario("2").running()
    taken = job.now
    job.wait(timedelta(minutes=10))
    seen(job, WAITS, sleeps(LOCK), taken_at=taken)
    assert job.generation == 1


def test_a_node_that_cannot_be_reached_may_step_again():
    job = Scenario("2").running().transition(0, NodeUnreachable, generation=1)
    seen(job, WAITS, sleeps(LOCK))
    assert job.generation == 1


def test_a_node_tells_nothing_of_ranks_that_are_not_its_own():
    job = Scenario("2").running()
    job.transition(0, NodeStallLook, generation=1, look=look(WAITS, STOPPED, early=True, taken_at=job.now))
    assert job.generation == 1


def test_a_node_that_hangs_again_is_replaced():
    job = Scenario("3").running()
    for step in (100, 200):
        seen(job, WAITS, STOPPED, WAITS, progress=reported(step))
        if step == 100:
            job.steps()
            job.wait(60)
    assert job.incident.rule == 'hang/2 "the same node again: replace the node"'
    assert (job.node(1).incarnation, job.node(1).phase) == (2, NodePhase.REQUESTED)
    assert job.incarnations[0] == 1


def test_hangs_that_are_far_apart_replace_no_node():
    job = Scenario("3").running()
    for step in (100, 200):
        seen(job, WAITS, STOPPED, WAITS, progress=reported(step))
        job.steps()
        job.wait(timedelta(hours=2))
    assert job.incarnations == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(
    ("on_hang", "rank"), [("replace", STOPPED), ("restart", IN_KERNEL)], ids=["by request", "no signal ends it"]
)
def test_a_node_is_replaced_at_once(on_hang: str, rank: dict[str, Any]):
    job = seen(Scenario("3", recovery={"on_hang": on_hang}).running(), WAITS, rank, WAITS)
    assert (job.node(1).incarnation, job.node(1).phase) == (2, NodePhase.REQUESTED)


def test_ranks_that_wait_for_each_other_are_restarted_although_no_node_is_named():
    job = seen(Scenario("2").running(), WAITS, sleeps(BARRIER))
    assert job.generation == 2
    assert job.incident.culprit is None
    assert "ranks wait for each other in different calls" in job.incident.title


def test_the_same_line_on_another_node_stops_the_job_with_the_line():
    job = Scenario("3").running()
    seen(job, WAITS, sleeps(LOCK), WAITS, progress=reported(100))
    job.steps()
    job.wait(60)
    seen(job, WAITS, WAITS, sleeps(LOCK), progress=reported(100))
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 1
    assert "the script hangs on several nodes, in exchange, /job/train.py:12" in job.state.outcome.reason


def test_hangs_that_gain_no_step_use_up_the_budget():
    job = Scenario("2", recovery={"on_capacity_loss": "fail"}).running()
    for _ in range(5):
        if job.state.outcome is None:
            seen(job, WAITS, STOPPED, progress=reported(100))
            job.wait(60)
        if job.state.outcome is None:
            job.steps()
    assert job.state.outcome is not None
    assert job.state.outcome.reason.startswith("no progress over 3 restarts")


@pytest.mark.parametrize(("action", "incarnations"), [("restart", {0: 1, 1: 1, 2: 1}), ("replace", {0: 1, 1: 2, 2: 1})])
def test_a_rule_of_the_job_says_what_is_done_about_a_rank_that_hangs(action: str, incarnations: dict[int, int]):
    rule = {"match": {"failures": ["RANK_HANG"]}, "action": action}
    job = Scenario("3", retry={"rules": [rule]}, recovery={"on_hang": "restart"}).running()
    for step in (100, 200)[: 1 if action == "replace" else 2]:
        seen(job, WAITS, STOPPED, WAITS, progress=reported(step))
        job.steps()
        job.wait(60)
    assert job.incident.rule == 'retry-rule/1 "retry.rules[0]"'
    assert (job.incident.culprit, job.incident.failure) == (1, FailureClass.RANK_HANG)
    assert job.incident.hang is not None
    assert job.incarnations == incarnations


def test_a_rule_replaces_no_node_where_none_is_known_to_hang():
    rule = {"match": {"failures": ["RANK_HANG"]}, "action": "replace"}
    job = seen(Scenario("2", retry={"rules": [rule]}).running(), WAITS, sleeps(BARRIER))
    assert (job.generation, job.incarnations, job.incident.culprit) == (2, {0: 1, 1: 1}, None)


def test_ranks_that_were_restarted_for_another_reason_are_restarted_when_one_hangs():
    job = Scenario("3").running().rank_raised(1)
    job.steps()
    job.wait(60)
    seen(job, WAITS, STOPPED, WAITS, progress=reported(200))
    assert job.incident.rule == 'hang/1 "a rank hangs: restart in place"'


def test_a_hang_that_is_seen_during_a_repair_is_that_of_the_world_which_is_over():
    job = Scenario("3").running().lost(2)
    over = job.generation
    assert job.state.interruption is not None
    for node, rank in enumerate([WAITS, sleeps(LOCK)]):
        job.transition(node, NodeStallLook, generation=over, look=look(rank, first=node, generation=over))
    assert (job.generation, job.state.interruption.hang) == (over, None)
    job.ready(0, 1, 2)
    assert job.generation == over + 1
    job.steps()
    assert all(node.look is None or node.look.generation < job.generation for node in job.state.nodes.values())
    assert job.incident.failure is FailureClass.NODE_LOST


def test_a_rank_that_hangs_again_in_the_world_after_a_repair_is_found_there():
    job = Scenario("3").running().rank_killed(2)
    assert job.generation == 2
    job.ready(0, 1, 2).steps()
    seen(job, WAITS, sleeps(LOCK), WAITS)
    assert job.generation == 3
    assert [one.failure for one in job.state.incidents] == [FailureClass.KILLED, FailureClass.RANK_HANG]
