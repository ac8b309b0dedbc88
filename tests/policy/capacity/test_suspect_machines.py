"""Tests of the checks of machines on which something failed that may be the machine's own fault."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.cli.text import incident_line
from perdure.contract import LossCause
from perdure.contract.transitions import NodeChecked
from perdure.workflows.policy.record.projections import warnings_of
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import GOOD_DISK, Scenario

FULL_DISK = GOOD_DISK.replace(value=None, problem="No space left on device")
SEGFAULT, KILLED = 11, 9


def crashed(nodes: str = "3", **spec: Any) -> Scenario:
    """A job in which a rank of node 1 has crashed, and whose next world runs."""
    return Scenario(nodes, **spec).running().rank_killed(1, SEGFAULT).steps()


def desired(job: Scenario) -> dict[int, int]:
    return {rank: node.check_runs for rank, node in desires_of(job.state)[0].nodes.items()}


def twice(job: Scenario, rank: int, processor: float = 1000.0, **fields: Any) -> Scenario:
    for run in (1, 2):
        job.checked(rank, processor, run=run, **fields)
    return job


def test_a_machine_on_which_a_rank_crashed_is_checked_with_the_next_world_beside_others():
    job = Scenario("3").running().rank_killed(1, SEGFAULT)
    assert (job.generation, desired(job)) == (2, {0: 2, 1: 2, 2: 2})
    for rank in range(3):
        twice(job, rank)
    assert (job.generation, desired(job)) == (2, {0: 2, 1: 2, 2: 2})
    assert not warnings_of(job.state, job.job)
    assert not job.state.losses
    assert not job.node(1).suspicion


def test_a_machine_that_fails_is_avoided_and_named_and_its_node_stays():
    job = crashed()
    twice(job, 0)
    twice(job, 1, 400.0)
    assert (job.generation, job.node(1).incarnation) == (2, 1)
    assert [(loss.host, loss.cause) for loss in job.state.losses] == [("host-1", LossCause.MACHINE)]
    text = "processor: 400 MB/s is less than 500 MB/s: 50% of the median of 1 other figures, 1,000"
    assert job.incident.title == f"the machine of node 1, host-1, failed a check: {text}"
    assert warnings_of(job.state, job.job) == (
        f"the machine of node 1, host-1, failed a check after a failure that may be its own: {text}",
    )
    told = explanation(job.incident, job="job", flag="").plain
    assert "the machine was checked beside a restart, after a failure that may be its own" in told
    assert "keep the node; new nodes avoid its machine, where the backend chooses machines" in told
    assert "rank 1 SIGSEGV" in told
    assert incident_line(job.incident).endswith(": new nodes avoid its machine")
    twice(job, 2)
    assert len(job.state.losses) == 1
    assert next_deadline(job.whole, job.job, job.now) is None


def test_figures_that_arrive_later_count():
    job = crashed()
    twice(job, 1, 400.0)
    assert job.node(1).suspicion, "there is nothing to compare with yet"
    twice(job, 2)
    assert job.node(1).failed_check


def test_a_check_that_other_machines_fail_as_well_speaks_against_none():
    job = crashed()
    for rank in (0, 2, 1):
        twice(job, rank, disk=FULL_DISK)
    assert not job.state.losses


def test_a_machine_that_is_alone_is_compared_with_itself():
    job = Scenario("1").running().rank_killed(0, SEGFAULT).steps()
    twice(job, 0, 400.0, usual=1000.0)
    assert "9 earlier figures of this machine" in job.node(0).failed_check


@pytest.mark.parametrize("suspicious", [True, False])
def test_only_failures_that_may_be_the_machines_have_it_checked(suspicious: bool):
    job = Scenario("3").running()
    if suspicious:
        job.state = job.state.replace(losses=())
        job.rank_killed(1, SEGFAULT)
    else:
        job.rank_killed(1, KILLED)
    assert (1 in {rank for rank, runs in desired(job).items() if runs}) is suspicious


def test_a_machine_on_which_a_node_was_lost_before_is_checked_after_any_failure():
    job = Scenario("3").running().lost(1).ready(1).steps()
    assert [loss.host for loss in job.state.losses] == ["host-1"]
    job.rank_killed(1, KILLED)
    assert desired(job)[1] == 2


def test_checks_that_no_one_asked_for_say_nothing():
    job = Scenario("2").running()
    job.transition(1, NodeChecked, run=1, checks=(FULL_DISK,))
    assert not job.node(1).checks
    assert not job.state.incidents
