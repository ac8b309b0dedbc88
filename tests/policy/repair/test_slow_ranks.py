"""What is done about a slow rank: nothing, a replacement, or an experiment that tells machines from work."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import ExchangePlaces, FailureClass, RankStepTimes, ReplaceNodes, SlowCause
from perdure.contract.transitions import NodeStepTimes, NodeUnreachable
from perdure.workflows.policy.diagnosis.experiments import MEASUREMENTS
from perdure.workflows.policy.facts.events import RelaunchRequested, RepairsPaused
from perdure.workflows.policy.record.projections import next_action
from perdure.workflows.policy.timers import next_deadline
from tests.policy.capacity.test_planned_changes import make_durable
from tests.policy.checked import CheckedScenario
from tests.policy.checkpoints.test_commits import STORAGE
from tests.policy.scenario import Scenario

SLOW = 0.3
USUAL = 0.2


def job(action: str, nodes: str = "4", **spec: Any) -> Scenario:
    return CheckedScenario(nodes, recovery={"on_straggler": action}, **spec).running()


def report(job: Scenario, slow: Sequence[int] = (), *, at_place: Sequence[int] = (), measurements: int = 0) -> Scenario:
    """All nodes report: those on slow machines, and those at places with more work, compute longer."""
    world = job.state.world
    assert world is not None
    for rank, member in world.members.items():
        compute = SLOW if rank in slow or member.group_rank in at_place else USUAL
        times = RankStepTimes(
            rank=member.base_rank,
            compute=compute,
            wait=SLOW - compute if slow or at_place else 0.0,
            rest=0.0,
            computes=(compute,) * measurements,
        )
        job.transition(rank, NodeStepTimes, generation=world.generation, ranks=(times,))
    return job


def waited(job: Scenario) -> Scenario:
    """Time in which the others wait for the slow rank for as long as a restart is taken to cost."""
    return job.wait(job.job.timing.stragglers.restart_cost / (1 - USUAL / SLOW) + timedelta(seconds=1))


def experiment(slow: int = 2) -> Scenario:
    return waited(report(job("experiment"), [slow])).steps()


def test_a_rank_that_has_cost_less_than_a_restart_is_only_shown():
    known = report(job("replace"), [2]).wait(150)
    assert (known.generation, known.state.interruption) == (1, None)
    [entry] = known.state.incidents
    assert entry.observation is not None
    assert [option.why_not for option in entry.considered] == [
        "that waits until the others have waited for this rank for as long as a restart takes"
    ]
    assert next_deadline(known.whole, known.job, known.now) is not None


def test_one_that_is_as_fast_as_the_others_again_costs_nothing_more():
    known = waited(report(report(job("replace"), [2]).wait(100)))
    assert known.generation == 1
    assert next_deadline(known.whole, known.job, known.now) is None


def test_the_node_of_one_that_has_cost_more_is_replaced_and_the_gain_is_told():
    known = waited(report(job("replace"), [2]))
    assert known.incarnations == {0: 1, 1: 1, 2: 2, 3: 1}
    incident = known.incident
    assert (incident.failure, incident.culprit) == (FailureClass.STRAGGLER, 2)
    assert isinstance(incident.actions[0], ReplaceNodes)
    report(known.ready(2).removed(2).steps())
    told = explanation(known.incident, job="llama", flag="").plain
    assert "rank 2 is slow, and the others wait for it" in told
    assert 'rule straggler/2 "recovery.on_straggler: replace its node"' in told
    assert "a step took 0.30 s before, and 0.20 s after" in told


def test_one_whose_gpu_alone_runs_with_reduced_clocks_is_throttled():
    known = job("replace")
    for rank, compute in enumerate((USUAL, USUAL, SLOW, USUAL)):
        slowed = "thermal" if rank == 2 else ""
        times = RankStepTimes(rank=rank, compute=compute, wait=SLOW - compute, rest=0.0, slowed=slowed)
        known.transition(rank, NodeStepTimes, generation=1, ranks=(times,))
    incident = waited(known).incident
    assert (incident.failure, incident.culprit) == (FailureClass.THROTTLED, 2)
    assert isinstance(incident.actions[0], ReplaceNodes)
    told = explanation(incident, job="llama", flag="").plain
    assert "the clocks of its GPU are reduced (thermal)" in told


def test_one_is_replaced_after_a_pause_of_repairs():
    known = job("replace")
    known = waited(report(known.take(RepairsPaused(until=known.now + timedelta(days=1))), [2]))
    assert (known.generation, known.incarnations[2]) == (1, 1)
    assert known.wait(timedelta(days=1)).incarnations[2] == 2


def test_one_whose_second_machine_is_as_slow_has_more_work():
    known = waited(report(job("replace"), [2])).ready(2).removed(2).steps()
    waited(report(known.wait(3600), [2])).wait(7200)
    assert known.incarnations[2] == 2
    assert [option.why_not for option in known.incident.considered] == [
        "the rank is slow on another machine, too: it has more work than the others"
    ]
    assert next_deadline(known.whole, known.job, known.now) is None


def test_one_whose_second_machine_was_fast_is_replaced_again_when_that_becomes_slow():
    known = waited(report(job("replace"), [2])).ready(2).removed(2).steps()
    waited(report(report(known).wait(3600), [2]))
    assert known.incarnations[2] == 3


def test_an_experiment_exchanges_the_places_of_two_nodes_and_replaces_none():
    known = waited(report(job("experiment"), [2]))
    assert known.group_ranks == {0: 0, 1: 2, 2: 1, 3: 3}
    assert set(known.incarnations.values()) == {1}
    assert known.incident.actions == (ExchangePlaces(nodes=(2, 1)),)
    assert known.state.world is not None
    assert known.state.world.measurements == MEASUREMENTS
    told = explanation(known.incident, job="llama", flag="").plain
    assert "restart the ranks of every node in place, with the places of nodes 2 and 1 exchanged" in told


def test_what_follows_the_machine_has_its_node_replaced():
    known = report(experiment(), [2], measurements=5)
    assert known.incarnations == {0: 1, 1: 1, 2: 2, 3: 1}
    exchange, replacement = known.state.incidents[-2:]
    for incident in (exchange, replacement):
        assert incident.slowness is not None
        assert incident.slowness.cause is SlowCause.MACHINE
        assert incident.slowness.p_value is not None
        assert incident.slowness.p_value < 0.001
    assert replacement.title == "node 2 is slow at another place, too"
    told = explanation(exchange, job="llama", flag="").plain
    assert (
        "at the place of node 1, node 2 computes 1.50 times as long as the others, and node 1 at its place 1.00" in told
    )
    assert "it is the machine (p <= 0.00098, 5 measurements)" in told


def test_what_stays_at_the_place_is_the_work_of_the_rank_and_no_machine_is_replaced():
    known = report(experiment(), at_place=[2], measurements=5)
    assert set(known.incarnations.values()) == {1}
    assert known.generation == 2
    assert known.incident.title == "rank 2 is slow because of its own work, not of its machine; training continued"
    assert known.incident.slowness is not None
    assert known.incident.slowness.cause is SlowCause.PLACE
    told = explanation(known.incident, job="llama", flag="").plain
    assert "NOT   replace the node: the rank is slow on another machine, too" in told
    report(known.wait(7200), at_place=[2])
    assert waited(known).generation == 2


def test_what_is_over_after_the_exchange_is_left_alone():
    known = report(experiment(), measurements=5)
    assert (known.generation, set(known.incarnations.values())) == (2, {1})
    assert known.incident.slowness is not None
    assert known.incident.slowness.cause is SlowCause.NEITHER


def test_too_few_measurements_decide_nothing_and_the_experiment_ends_in_time():
    known = report(experiment(), [2], measurements=4)
    assert known.generation == 2
    known.wait(timedelta(hours=1))
    assert known.generation == 2
    assert known.incident.slowness is not None
    assert known.incident.slowness.cause is SlowCause.UNKNOWN
    assert next_deadline(known.whole, known.job, known.now) is None


def test_the_next_experiment_waits():
    known = report(experiment(), measurements=5)
    began = known.now
    known.rank_killed(0).steps()
    report(known, [1])
    while known.generation == 3:
        deadline = next_deadline(known.whole, known.job, known.now)
        assert deadline is not None
        known.wait(deadline - known.now)
    assert known.now - began >= known.job.timing.stragglers.between - timedelta(minutes=1)


def test_a_failure_ends_an_experiment_and_is_repaired():
    known = experiment().rank_killed(0).steps()
    report(known, [2], measurements=5)
    assert (known.generation, set(known.incarnations.values())) == (3, {1})
    assert known.state.memory.slow_ranks.experiment is None


def test_an_experiment_whose_world_is_given_up_is_forgotten_at_once():
    known = waited(report(job("experiment", "3:4"), [2]))
    assert known.state.memory.slow_ranks.experiment is not None
    known.transition(2, NodeUnreachable).wait(known.job.timing.rendezvous.enter_timeout + timedelta(minutes=1))
    assert known.generation == 3
    assert known.state.memory.slow_ranks.experiment is None


@pytest.mark.parametrize("action", ["replace", "experiment"])
def test_nothing_is_done_while_a_node_cannot_be_reached(action: str):
    known = report(job(action), [2]).transition(3, NodeUnreachable)
    assert waited(known).generation == 1


@pytest.mark.parametrize("action", ["replace", "experiment"])
def test_half_of_the_restarts_are_kept_for_failures(action: str):
    known = job(action, retry={"max_restarts": 2, "window": "10h"}).rank_killed(0, progress=None).steps()
    assert waited(report(known, [2])).generation == 2
    assert [option.why_not for option in known.incident.considered] == [
        "half of retry.max_restarts is kept for failures"
    ]


def test_machines_that_join_by_themselves_are_not_replaced():
    known = job("replace", backend="joined")
    assert waited(report(known, [2])).generation == 1


def test_by_default_it_is_only_shown():
    assert waited(report(CheckedScenario("4").running(), [2])).wait(86400).generation == 1


def storing(action: str) -> Scenario:
    return report(CheckedScenario("4", recovery={"on_straggler": action}, checkpoint=STORAGE).running(), [2])


@pytest.mark.parametrize("action", ["replace", "experiment"])
def test_a_job_that_stores_checkpoints_first_makes_one(action: str):
    known = waited(storing(action))
    assert known.generation == 1
    assert "a checkpoint, then node" in next_action(known.state, known.job)
    make_durable(known, answers=1)
    assert (known.generation if action == "experiment" else known.incarnations[2]) == 2
    assert any("the checkpoint of step 30, requested at" in one.text for one in known.incident.evidence)
    assert known.state.postponed is None


def test_a_rank_that_is_fast_again_before_the_checkpoint_is_left_alone():
    known = report(waited(storing("replace")))
    assert known.state.postponed is None
    make_durable(known, answers=1)
    assert known.incarnations[2] == 1


def test_no_checkpoint_is_made_while_repairs_are_paused_and_a_new_one_after_it():
    known = waited(storing("replace"))
    assert known.state.checkpoints.requests == 1
    known.take(RepairsPaused(until=known.now + timedelta(days=1)))
    assert known.state.postponed is None
    assert "checkpoint" not in next_action(known.state, known.job)
    make_durable(known, answers=1)
    for _ in range(5):
        known.wait(timedelta(hours=1))
    assert (known.state.checkpoints.requests, known.incarnations[2]) == (1, 1)
    known.wait(timedelta(hours=19))
    assert (known.state.checkpoints.requests, known.incarnations[2]) == (2, 1)
    make_durable(known, step=40, answers=2)
    assert known.incarnations[2] == 2


def test_a_user_who_replaces_a_node_meanwhile_has_it_replaced():
    known = waited(storing("experiment")).take(RelaunchRequested(rank=2))
    make_durable(known, answers=1)
    assert known.incarnations[2] == 2
    assert known.incident.failure is None
