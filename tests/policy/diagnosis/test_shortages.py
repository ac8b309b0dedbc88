"""Tests of a Temporal server that lacks capacity: no node is given up, and people learn which setting is too low."""

from __future__ import annotations

from datetime import timedelta

from perdure.contract.agents import REFUSAL_LASTS
from perdure.contract.transitions import NodeCommanded, NodeJoined, NodePollsRefused, NodeUnreachable, NodeUnresponsive
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.diagnosis.shortages import LONGEST
from perdure.workflows.policy.record.projections import next_action, warnings_of
from tests.policy.scenario import Scenario


def test_while_the_server_refuses_polls_silence_replaces_nobody_and_the_setting_is_named():
    job = Scenario("1:2").running().rank_killed(0)
    assert job.generation == 2
    job.transition(1, NodePollsRefused, cause="namespace concurrent poller limit exceeded")
    job.wait(4).transition(1, NodeUnreachable, detail="its lease lapsed").transition(1, NodeUnresponsive, generation=2)
    for _ in range(10):
        job.wait(30).transition(1, NodePollsRefused, cause="namespace concurrent poller limit exceeded")
    job.transition(1, NodeUnresponsive, generation=2)
    assert (job.generation, job.incarnations) == (2, {0: 1, 1: 1})
    assert "the Temporal server refuses polls" in job.node(1).reason
    [warning] = warnings_of(job.state, job.job)
    assert "raise frontend.namespaceCount" in warning
    assert "Temporal server" in next_action(job.state, job.job)
    job.transition(1, NodeCommanded, generation=2).steps().wait(REFUSAL_LASTS)
    assert not warnings_of(job.state, job.job)
    assert job.incarnations == {0: 1, 1: 1}


def test_a_node_that_stays_silent_after_the_servers_shortage_is_replaced():
    job = Scenario("1:2").running().rank_killed(0)
    job.transition(1, NodePollsRefused, cause="namespace concurrent poller limit exceeded")
    job.wait(4).transition(1, NodeUnresponsive, generation=2).wait(REFUSAL_LASTS).transition(
        1, NodeUnresponsive, generation=2
    )
    assert job.generation == 3
    assert job.group_ranks == {0: 0}


def test_no_wait_for_nodes_ends_while_the_server_refuses_polls():
    job = Scenario("2", timing={"rendezvous": {"join_timeout": "1m"}}).ready(0)
    for _ in range(5):
        job.transition(0, NodePollsRefused, cause="namespace rate limit exceeded").wait(30)
    assert job.state.outcome is None
    job.wait(REFUSAL_LASTS)
    assert job.state.outcome is not None


def _broken_by_a_silent_node(nodes: str) -> Scenario:
    """The last node neither renews its lease nor takes the next world."""
    job = Scenario(nodes).running().rank_killed(0)
    dead = job.state.nodes_max - 1
    return job.wait(4).transition(dead, NodeUnreachable, detail="its lease lapsed")


def _refused(job: Scenario, *ranks: int) -> Scenario:
    for rank in ranks:
        job.transition(rank, NodePollsRefused, cause="namespace concurrent poller limit exceeded")
    return job


def test_a_few_refused_agents_do_not_excuse_the_silence_of_a_node_among_many_that_poll():
    job = _broken_by_a_silent_node("2:4")
    for _ in range(4):
        _refused(job, 0).wait(30)
    job.transition(3, NodeUnresponsive, generation=2)
    assert job.node(3).incarnation == 2
    [warning] = [one for one in warnings_of(job.state, job.job) if "refuses polls" in one]
    assert "some agents" in warning
    assert "raise frontend.namespaceCount" in warning
    assert "Temporal server" not in next_action(job.state, job.job)


def test_a_refused_agent_among_many_that_poll_is_excused_itself():
    job = _broken_by_a_silent_node("2:4")
    for _ in range(4):
        _refused(job, 3).transition(3, NodeUnresponsive, generation=2).wait(30)
    assert job.incarnations == {0: 1, 1: 1, 2: 1, 3: 1}
    assert "the Temporal server refuses polls" in job.node(3).reason
    job.wait(REFUSAL_LASTS).transition(3, NodeUnresponsive, generation=2)
    assert job.node(3).incarnation == 2


def test_half_of_the_agents_refused_excuse_the_silence_of_all():
    job = _refused(_broken_by_a_silent_node("2:5"), 0, 1)
    for _ in range(4):
        _refused(job, 0, 1).transition(4, NodeUnresponsive, generation=2).wait(30)
    assert job.node(4).incarnation == 1


def test_a_run_that_an_older_release_began_excuses_all_for_one_refused_agent():
    job = _broken_by_a_silent_node("2:4")
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    _refused(job, 0).wait(30)
    _refused(job, 0).transition(3, NodeUnresponsive, generation=2)
    assert job.node(3).incarnation == 1


def test_a_wait_ends_for_one_refused_agent_that_is_not_awaited():
    job = Scenario("4", timing={"rendezvous": {"join_timeout": "1m"}}).ready(0, 1, 2)
    for _ in range(5):
        _refused(job, 0).wait(30)
    assert job.state.outcome is not None


def test_no_wait_ends_while_polls_of_an_awaited_agent_are_refused():
    job = Scenario("4", timing={"rendezvous": {"join_timeout": "1m"}}).ready(0, 1, 2)
    job.transition(3, NodeJoined, address="10.0.0.3", host="host-3")
    for _ in range(5):
        _refused(job, 3).wait(30)
    assert job.state.outcome is None


def test_a_report_counts_for_as_long_as_its_agent_says_within_a_limit():
    def until(lasts: timedelta) -> timedelta:
        job = Scenario("1:2").running().transition(1, NodePollsRefused, cause="namespace rate limit", lasts=lasts)
        shortage = job.whole.shortage
        assert shortage is not None
        return shortage.until - job.now

    assert until(timedelta(minutes=6)) == timedelta(minutes=6)
    assert until(timedelta(days=9)) == LONGEST
