"""Tests of which new nodes a job takes in, by the checks of their machines."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.cli.explain import explanation
from perdure.contract import LossCause, NodePhase
from perdure.contract.transitions import NodeJoined
from perdure.workflows.policy.capacity import admission
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import GOOD_DISK, Scenario

CLUSTER: dict[str, Any] = {
    "backend": "kubernetes",
    "roles": {"worker": {"nodes": "3", "image": "i", "command": ["torchrun", "train.py"]}},
}
FULL_DISK = GOOD_DISK.replace(value=None, problem="No space left on device")


class Checking(Scenario):
    def __init__(self, nodes: str = "3", **spec: Any) -> None:
        super().__init__(nodes, **({"preflight": "quick"} | spec))

    def runs_desired(self, rank: int) -> int:
        return desires_of(self.state)[0].nodes[rank].check_runs


def test_a_world_waits_for_the_checks_of_its_nodes():
    job = Checking()
    job.ready(0, 1, 2).checked(0).checked(1)
    assert job.state.world is None
    assert "node 2: its machine is being checked" in job.whole.reason
    job.checked(2)
    assert job.group_ranks == {0: 0, 1: 1, 2: 2}
    assert not job.state.incidents


def test_without_checks_nothing_waits():
    assert Checking(preflight="off").ready(0, 1, 2).group_ranks == {0: 0, 1: 1, 2: 2}


def test_a_slow_machine_is_checked_again_and_then_not_taken_in():
    job = Checking(**CLUSTER)
    job.ready(0, 1, 2).checked(0).checked(1, 400.0).checked(2)
    assert (job.runs_desired(0), job.runs_desired(1)) == (0, 2)
    assert job.state.world is None
    job.checked(1, 410.0, run=2)
    node = job.node(1)
    assert (node.incarnation, node.avoids, node.refusals) == (2, ("host-1",), 1)
    assert job.state.losses[-1].cause is LossCause.MACHINE
    reason = "processor: 410 MB/s is less than 500 MB/s: 50% of the median of 2 other figures, 1,000"
    assert job.incident.title == f"node 1 was not taken in: {reason}"
    told = explanation(job.incident, job="job", flag="").plain
    assert "replace the node, on another machine if one has room" in told
    assert "a second run of the check says the same, and other nodes pass it" in told
    job.transition(1, NodeJoined, host="host-9")
    job.ready(1).checked(1)
    assert job.group_ranks == {0: 0, 1: 1, 2: 2}
    assert job.node(1).refusals == 0


def test_a_moment_of_load_is_forgiven():
    job = Checking()
    job.ready(0, 1, 2).checked(0).checked(1, 100.0).checked(2).checked(1, 990.0, run=2)
    assert job.generation == 1
    assert not job.state.incidents


def test_a_repeated_or_older_run_counts_once():
    job = Checking()
    job.ready(0, 1, 2).checked(0).checked(2).checked(1, 100.0).checked(1, 100.0)
    assert (job.generation, job.node(1).incarnation) == (0, 1)


def test_what_every_node_fails_keeps_none_out_and_is_recorded():
    job = Checking()
    job.ready(0, 1, 2)
    for run in (1, 2):
        for rank in range(3):
            job.checked(rank, run=run, disk=FULL_DISK)
    assert job.generation == 1
    assert {incident.title for incident in job.state.incidents} == {
        f"node {rank} was taken in although it fails a check: disk of run directory: No space left on device"
        for rank in range(3)
    }
    assert job.incident.considered[0].why_not == "no other node passes that check"
    assert "take the node in" in explanation(job.incident, job="job", flag="").plain


def test_a_machine_that_is_slower_than_before_is_named_where_it_is_alone():
    job = Checking("1")
    job.ready(0)
    for run in (1, 2):
        job.checked(0, 400.0, run=run, usual=1000.0)
    assert job.generation == 1
    assert job.incident.title == (
        "node 0 was taken in although it fails a check: processor: 400 MB/s is less than 500 MB/s: 50% of the median "
        "of 9 earlier figures of this machine, 1,000"
    )
    assert job.incident.considered[0].why_not == "no other machine passes that check"


def test_a_place_is_refused_twice_in_a_row_at_most():
    job = Checking()
    job.ready(0, 1, 2).checked(0).checked(2)
    for incarnation in (1, 2, 3):
        job.wait(60)
        assert job.node(1).incarnation == incarnation
        job.ready(1)
        for run in (1, 2):
            job.checked(1, run=run, disk=FULL_DISK)
    assert (job.generation, job.node(1).incarnation) == (1, 3)
    assert "its place was refused 2 times in a row" in job.incident.considered[0].why_not


def test_the_first_one_waits_for_figures_of_the_others_and_not_for_long():
    job = Checking("1:3", timing={"rendezvous": {"last_call": "1s"}})
    job.transition(1, NodeJoined, host="host-1")
    job.ready(0).checked(0, 300.0).wait(5)
    assert job.state.world is None
    job.wait(admission.WAIT)
    assert job.group_ranks == {0: 0}
    assert not job.state.incidents


def test_a_node_that_reports_no_checks_has_failed_them():
    job = Checking(**CLUSTER)
    job.ready(0, 1, 2).checked(0).checked(2).wait(admission.LONGEST - timedelta(seconds=1))
    assert (job.generation, job.node(1).incarnation) == (0, 1)
    job.wait(1)
    assert job.node(1).incarnation == 2
    assert job.incident.title.endswith("report: its agent has reported no checks within 3 minutes")


def test_agents_that_report_no_checks_at_all_keep_no_job_waiting():
    job = Checking()
    job.ready(0, 1, 2).wait(admission.LONGEST)
    assert job.generation == 1


def test_a_bad_machine_does_not_disturb_a_world_that_trains():
    job = Checking("2:3", timing={"rendezvous": {"last_call": "1s"}})
    job.ready(0, 1).checked(0).checked(1).wait(1).steps()
    job.ready(2)
    for run in (1, 2):
        job.checked(2, 100.0, run=run)
    assert (job.generation, job.node(2).incarnation) == (1, 2)
    job.ready(2).wait(1)
    assert job.generation == 1
    job.checked(2).wait(1)
    assert job.group_ranks == {0: 0, 1: 1, 2: 2}


def test_a_replacement_is_commanded_once_it_is_checked():
    """Its command may be on its way to the rendezvous still."""
    job = Checking()
    job.ready(0, 1, 2).checked(0).checked(1).checked(2).steps().lost(1)
    job.transition(1, NodeJoined, host="host-8")
    assert job.generation == 1
    job.checked(1)
    assert job.generation == 2


@pytest.mark.parametrize("phase", [NodePhase.JOINED, NodePhase.READY])
def test_a_node_that_is_lost_while_it_is_checked_is_replaced(phase: NodePhase):
    job = Checking()
    job.ready(0, 2).checked(0).checked(2)
    job.transition(1, NodeJoined) if phase is NodePhase.JOINED else job.ready(1)
    job.checked(1, 100.0).lost(1)
    job.wait(60)
    assert job.node(1).incarnation == 2
    job.ready(1).checked(1)
    assert job.generation == 1


@given(st.data(), st.integers(1, 5))
def test_a_job_whose_agents_answer_always_comes_to_a_world(data: st.DataObject, nodes: int):
    """Whatever the machines are like."""
    job = Checking(str(nodes))
    for _ in range(200):
        if job.generation:
            break
        for rank in range(nodes):
            node = job.node(rank)
            if not node.alive:
                job.wait(5)
            elif node.phase is not NodePhase.READY:
                job.ready(rank)
            elif node.unchecked and node.checked_runs < max(node.check_runs, 1):
                disk = data.draw(st.sampled_from([GOOD_DISK, FULL_DISK]))
                job.checked(rank, data.draw(st.floats(1.0, 1e4)), run=max(node.check_runs, 1), disk=disk)
            else:
                job.wait(1)
    assert job.generation == 1
    assert all(node.incarnation <= admission.REFUSALS + 1 for node in job.state.nodes.values())
