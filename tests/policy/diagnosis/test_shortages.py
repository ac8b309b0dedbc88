"""Tests of a Temporal server that lacks capacity: no node is given up, and people learn which setting is too low."""

from __future__ import annotations

from perdure.contract.transitions import NodeCommanded, NodePollsRefused, NodeUnreachable, NodeUnresponsive
from perdure.workflows.policy.diagnosis.shortages import LASTS
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
    job.transition(1, NodeCommanded, generation=2).steps().wait(LASTS)
    assert not warnings_of(job.state, job.job)
    assert job.incarnations == {0: 1, 1: 1}


def test_a_node_that_stays_silent_after_the_servers_shortage_is_replaced():
    job = Scenario("1:2").running().rank_killed(0)
    job.transition(1, NodePollsRefused, cause="namespace concurrent poller limit exceeded")
    job.wait(4).transition(1, NodeUnresponsive, generation=2).wait(LASTS).transition(1, NodeUnresponsive, generation=2)
    assert job.generation == 3
    assert job.group_ranks == {0: 0}


def test_no_wait_for_nodes_ends_while_the_server_refuses_polls():
    job = Scenario("2", timing={"rendezvous": {"join_timeout": "1m"}}).ready(0)
    for _ in range(5):
        job.transition(0, NodePollsRefused, cause="namespace rate limit exceeded").wait(30)
    assert job.state.outcome is None
    job.wait(LASTS)
    assert job.state.outcome is not None
