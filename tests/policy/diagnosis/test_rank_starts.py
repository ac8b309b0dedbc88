"""Tests that incidents say how the ranks of the new world were started, which explains slow restarts."""

from __future__ import annotations

from perdure.cli.explain import explanation
from perdure.contract import RankStarts
from perdure.contract.transitions import NodeStepping
from tests.policy.scenario import Scenario


def recovered(*starts: RankStarts | None) -> Scenario:
    """A rank was killed, all nodes are back in the next world, and say this."""
    job = Scenario(nodes=str(len(starts))).running().rank_killed(0).ready(*range(len(starts)), after=1)
    for rank, said in enumerate(starts):
        job.transition(rank, NodeStepping, generation=2, starts=said)
    return job


def test_starts_of_all_members_are_added_up() -> None:
    cold = RankStarts(warm=1, cold=1, reason="its environment differs in OMP_NUM_THREADS")
    standby = RankStarts(warm=2, standbys=1, standby_reason="the node has GPUs")
    [incident] = recovered(standby, cold).state.incidents
    assert incident.stepping_at is not None
    assert incident.starts == RankStarts(
        warm=3, cold=1, reason=cold.reason, standbys=1, standby_reason=standby.standby_reason
    )
    told = explanation(incident, job="j", flag="").plain
    assert "; 3 ranks started warm (1 from standbys: the node has GPUs), 1 rank started cold: its environment" in told


def test_a_member_that_says_it_twice_counts_once() -> None:
    job = recovered(RankStarts(warm=1), None)
    job.transition(0, NodeStepping, generation=2, starts=RankStarts(warm=1))
    assert job.state.incidents[0].starts == RankStarts(warm=1)


def test_agents_that_say_nothing_leave_it_open() -> None:
    assert recovered(None, None).state.incidents[0].starts is None


def test_only_the_starts_of_the_newest_world_count() -> None:
    """The same incident may end several worlds before one steps as a whole."""
    job = Scenario(nodes="2").running().rank_killed(0).ready(0, 1, after=1)
    job.transition(0, NodeStepping, generation=2, starts=RankStarts(warm=1))
    job.rank_killed(1).ready(0, 1, after=2)
    for rank in (0, 1):
        job.transition(rank, NodeStepping, generation=3, starts=RankStarts(warm=1))
    assert job.state.incidents[-1].starts == RankStarts(warm=2)
