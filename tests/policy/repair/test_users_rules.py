"""Tests of `retry.rules`: which rule decides, what it does, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.contract import FailureClass, LossCause, RankExit, RuleMatch
from perdure.contract.transitions import NodeLost
from perdure.spec.rules import RuleFailure
from perdure.workflows.policy.decide import apply_events
from perdure.workflows.policy.facts.events import TimePassed
from tests.policy.scenario import Scenario

LINE = "NET/IB : Got async event : port error"
LOG = {"match": {"log": "port error"}, "action": "replace", "reason": "its card has failed"}
KUBERNETES: dict[str, Any] = {
    "backend": "kubernetes",
    "roles": {"worker": {"nodes": "2", "command": ["torchrun", "train.py"], "image": "x"}},
}
RAISED = (RankExit(local_rank=0, global_rank=1, exit_code=1, error="ValueError: bad batch"),)
FITS = (RuleMatch(rule=0, line=LINE),)


def job_with(*rules: dict[str, Any], nodes: str = "2", **spec: Any) -> Scenario:
    retry = {**spec.pop("retry", {}), "rules": list(rules)}
    return Scenario(nodes, retry=retry, **spec).running()


def decides(job: Scenario) -> str:
    return job.incident.rule


def test_each_class_that_a_rule_may_name_is_a_failure_class():
    assert {failure.value for failure in RuleFailure} <= {failure.value for failure in FailureClass}


def test_a_rule_for_a_line_replaces_the_node_and_the_incident_says_why():
    job = job_with(LOG, **KUBERNETES).rank_raised(1, matches=FITS)
    incident = job.incident
    assert decides(job) == 'retry-rule/1 "retry.rules[0]: its card has failed"'
    assert incident.action == (
        "ask for a replacement, on another machine if one has room; restart the other ranks in place"
    )
    assert f"its output fits retry.rules[0]: {LINE}" in [one.text for one in incident.evidence]
    assert (incident.failure, incident.culprit) == (FailureClass.USER_CODE, 1)
    assert [(one.option, one.why_not) for one in incident.considered] == [
        ("restart in place", "retry.rules[0]: its card has failed")
    ]
    assert (job.incarnations, job.node(1).avoids) == ({0: 1, 1: 2}, ("host-1",))
    assert [loss.cause for loss in job.state.losses] == [LossCause.MACHINE]


def test_without_a_match_the_job_does_what_it_does_by_itself():
    job = job_with(LOG).rank_raised(1)
    assert decides(job) == 'rank-failure/1 "restart in place"'
    assert job.incarnations == {0: 1, 1: 1}


def test_a_pattern_that_took_too_long_fits_nothing_and_the_incident_says_so():
    job = job_with(LOG).rank_raised(1, matches=(RuleMatch(rule=0, too_slow=True),))
    assert decides(job) == 'rank-failure/1 "restart in place"'
    assert any("the pattern takes too long" in one.text for one in job.incident.evidence)


@pytest.mark.parametrize(
    ("match", "exits", "fits"),
    [
        ({"exit_codes": [3, 4]}, {"exit_code": 4}, True),
        ({"exit_codes": [3, 4]}, {"exit_code": 1}, False),
        ({"exit_codes": [3, 4]}, {"signal": 4}, False),
        ({"signals": ["SIGBUS"]}, {"signal": 7}, True),
        ({"signals": ["SIGBUS"]}, {"exit_code": 128 + 7}, True),
        ({"signals": ["SIGBUS"]}, {"signal": 9}, False),
        ({"failures": ["CRASH"]}, {"signal": 11}, True),
        ({"failures": ["CRASH"]}, {"signal": 9}, False),
        ({"failures": ["STORAGE"]}, {"exit_code": 1, "error": "OSError: [Errno 116] Stale file handle"}, True),
        ({"failures": ["CRASH"], "signals": ["SIGBUS"]}, {"signal": 11}, False),
        ({"failures": ["CRASH"], "log": "port error"}, {"signal": 11}, False),
    ],
)
def test_every_part_of_a_match_must_fit(match: dict[str, Any], exits: dict[str, Any], fits: bool):
    job = job_with({"match": match, "action": "stop"})
    job.take(job.failure(1, ranks=(RankExit(local_rank=0, global_rank=1, **exits),))).wait(60)
    assert (job.state.outcome is not None) is fits


def test_the_first_rule_that_fits_decides():
    job = job_with({"match": {"failures": ["CRASH"]}, "action": "stop"}, LOG, {**LOG, "action": "stop"})
    job.rank_raised(1, matches=(RuleMatch(rule=1, line=LINE), RuleMatch(rule=2, line=LINE)))
    assert decides(job).startswith('retry-rule/1 "retry.rules[1]')


def test_a_rule_that_stops_says_so_in_the_result():
    job = job_with({**LOG, "action": "stop"}).rank_raised(1, matches=FITS)
    outcome = job.state.outcome
    assert outcome is not None
    assert outcome.reason == "rank 1 exit code 1: ValueError: bad batch; retry.rules[0]: its card has failed"
    assert outcome.exit_code == 1


def test_a_rule_that_restarts_goes_before_fatal_exit_codes_and_what_comes_again():
    rule = {"match": {"exit_codes": [2]}, "action": "restart"}
    job = job_with(rule)
    for _ in range(2):
        job.rank_raised(1, "torch.OutOfMemoryError: CUDA out of memory.", exit_code=2).steps()
    assert job.state.outcome is None
    assert decides(job) == 'retry-rule/1 "retry.rules[0]"'


@pytest.mark.parametrize("action", ["restart", "replace"])
def test_rules_use_up_the_budgets(action: str):
    job = job_with({**LOG, "action": action}, retry={"max_restarts": 1}, **KUBERNETES)
    job.rank_raised(1, matches=FITS)
    assert job.state.outcome is None
    if action == "replace":
        job.removed(1).ready(1)
    job.steps().rank_raised(1, matches=FITS)
    assert job.state.outcome is not None
    assert "retry.max_restarts" in job.state.outcome.reason


def test_the_class_of_a_victim_fits_only_where_no_cause_is_known():
    rule = {"match": {"failures": ["PEER_LOST"]}, "action": "stop"}
    job = job_with(rule).peer_failed(0)
    job.rank_killed(1)
    assert job.state.outcome is None
    job = job_with(rule).peer_failed(0).wait(job.job.timing.rendezvous.victim_grace)
    assert job.state.outcome is not None


def test_a_victim_that_a_rule_restarts_is_no_culprit():
    job = job_with({"match": {"failures": ["PEER_LOST"]}, "action": "restart"}).peer_failed(0).wait(60)
    assert (decides(job), job.incident.culprit) == ('retry-rule/1 "retry.rules[0]"', None)


def test_of_several_victims_the_one_whose_output_fits_is_replaced():
    job = job_with(LOG, **KUBERNETES).peer_failed(0).peer_failed(1, matches=FITS).wait(60)
    assert (job.incident.culprit, job.incarnations) == (1, {0: 1, 1: 2})


def test_a_node_that_is_gone_is_replaced_whatever_the_rules_say_of_another_one():
    job = job_with({"match": {"failures": ["USER_CODE"]}, "action": "stop"})
    loss = NodeLost(rank=0, incarnation=1, time=job.now)
    job.whole = apply_events(job.whole, (loss, job.failure(1, ranks=RAISED)), job.job, job.now)
    job.take(TimePassed())
    assert job.incident.failure is FailureClass.NODE_LOST
    assert job.state.outcome is None


@pytest.mark.parametrize(
    ("failure", "cause", "stops"),
    [
        ("PREEMPTED", LossCause.PREEMPTED, True),
        ("EVICTED", LossCause.EVICTED, True),
        ("EVICTED", LossCause.PREEMPTED, False),
        ("PREEMPTED", LossCause.UNKNOWN, False),
    ],
)
def test_a_rule_may_stop_a_job_that_loses_a_node_in_one_way(failure: str, cause: LossCause, stops: bool):
    job = job_with({"match": {"failures": [failure]}, "action": "stop"}, **KUBERNETES)
    job.lost(1, "it made room for another pod", cause)
    assert (job.state.outcome is not None) is stops
    if job.state.outcome is not None:
        assert job.state.outcome.reason == "node 1 lost: it made room for another pod; retry.rules[0]"


def test_a_rule_that_replaces_a_lost_node_goes_before_one_that_stops():
    rules = [{"match": {"failures": ["PREEMPTED"]}, "action": action} for action in ("replace", "stop")]
    job = job_with(*rules, **KUBERNETES).lost(1, "it made room", LossCause.PREEMPTED)
    assert (decides(job), job.incarnations) == ('retry-rule/1 "retry.rules[0]"', {0: 1, 1: 2})
    assert job.incident.title == "node 1 preempted, replacement requested"


def test_a_command_that_fails_before_any_world_is_replaced_by_either_action():
    for action in ("restart", "replace"):
        job = Scenario("1", retry={"rules": [{"match": {"exit_codes": [7]}, "action": action}]})
        job.command_exited(0, 7, generation=0)
        assert decides(job) == 'retry-rule/1 "retry.rules[0]"'
        assert job.state.outcome is None
