"""Losses and gradient norms that are not finite: what is shown, where the job goes back, and when it stops."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import FailureClass, JobPhase, NumberKind, RankNumber, RestartRanks, RollBack
from perdure.contract.worlds import UnsoundSteps
from perdure.workflows.policy.diagnosis.bad_numbers import describe, newest_sound
from perdure.workflows.policy.facts.events import RelaunchRequested
from perdure.workflows.policy.record.action_words import words
from perdure.workflows.policy.timers import next_deadline
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import Scenario, reported


def scenario(on_nan: str = "rollback", nodes: str = "2", **spec: Any) -> Scenario:
    return Scenario(nodes, recovery={"on_nan": on_nan}, **spec).running()


def unsound(job: Scenario) -> UnsoundSteps | None:
    world = desires_of(job.state)[0].world
    assert world is not None
    return world.unsound


def told(job: Scenario) -> str:
    return explanation(job.incident, job="llama", flag="").plain


@pytest.mark.parametrize(
    ("step", "last_finite", "sound"), [(57, 56, 55), (200, 100, 99), (57, None, 55), (1, None, -1), (1, 0, -1)]
)
def test_the_state_from_which_the_last_finite_loss_was_computed_is_sound(
    step: int, last_finite: int | None, sound: int
):
    number = RankNumber(rank=3, kind=NumberKind.LOSS, value="nan", step=step, last_finite=last_finite)
    assert newest_sound(number) == sound


def test_a_number_is_described_with_rank_step_and_samples():
    samples = ("train: samples 4, 7 of epoch 0",)
    number = RankNumber(rank=3, kind=NumberKind.GRADIENT_NORM, value="inf", step=1200, samples=samples)
    assert describe(number) == "the gradient norm of rank 3 is inf at step 1,200"
    assert describe(number, samples=True) == f"{describe(number)}; {samples[0]}"


# report


def test_by_default_the_training_continues_and_one_entry_of_the_world_tells_of_it():
    job = Scenario("2").running()
    job.bad_loss(1, 57, samples=("train: samples 4, 7 of epoch 0",)).wait(5)
    job.bad_loss(0, 58).bad_loss(1, 57).wait(60)
    assert (job.generation, job.state.interruption, job.state.restart_count) == (1, None, 0)
    [entry] = job.state.incidents
    assert entry.title == "the loss of rank 1 is nan at step 57; training continued"
    assert [(sign.rank, sign.text) for sign in entry.evidence] == [
        (1, "the loss of rank 1 is nan at step 57; train: samples 4, 7 of epoch 0"),
        (0, "the loss of rank 0 is nan at step 58"),
    ]
    assert "NOT   go back to a state from before it: recovery.on_nan is report" in told(job)
    assert "nothing: the training continued with it" in told(job)
    assert job.state.open_incident is None
    assert next_deadline(job.whole, job.job, job.now) is None


def test_the_next_world_has_an_entry_of_its_own():
    job = Scenario("2").running().bad_loss(1, 57)
    job.rank_killed(0).steps().bad_loss(1, 57)
    assert [one.observation is not None for one in job.state.incidents] == [True, False, True]
    assert len(job.state.bad_numbers) == 1


@pytest.mark.parametrize("on_nan", ["report", "rollback", "stop"])
def test_a_gradient_norm_interrupts_nothing(on_nan: str):
    job = scenario(on_nan).bad_loss(1, 57, kind=NumberKind.GRADIENT_NORM).wait(60)
    assert (job.generation, job.state.outcome) == (1, None)
    assert "a step whose gradients overflow may be left out by the script" in told(job)


def test_a_spike_interrupts_nothing():
    job = scenario().bad_loss(1, 57, kind=NumberKind.LOSS_SPIKE, value="41.2, where 2 is usual,").wait(60)
    assert job.generation == 1
    assert job.incident.title == "the loss of rank 1 is 41.2, where 2 is usual, at step 57; training continued"
    assert "most spikes pass by themselves" in told(job)


# rollback


def test_the_job_goes_back_to_a_sound_state_in_place():
    job = scenario().bad_loss(0, 57).bad_loss(1, 57)
    assert (job.generation, job.incarnations) == (2, {0: 1, 1: 1})
    assert unsound(job) == UnsoundSteps(generation=1, after=55, found_at=57)
    incident = job.incident
    assert (incident.failure, incident.culprit) == (FailureClass.NUMERIC, 0)
    assert incident.title == "node 0: the loss of rank 0 is nan at step 57"
    assert incident.action == "restart the ranks of every node in place; load a state of step 55 or before"
    assert incident.rule == 'bad-number/3 "go back to a sound state, once for a step"'
    job.steps()
    assert job.state.restart_count == 1
    assert "NOT   replace the node: nothing else speaks against its machine" in told(job)


def test_it_waits_a_moment_for_a_rank_that_was_first_and_is_reported_later():
    job = scenario(nodes="3").bad_loss(2, 58)
    assert (job.generation, job.state.interruption) == (1, None)
    job.wait(0.5).bad_loss(1, 57)
    assert job.generation == 1
    assert next_deadline(job.whole, job.job, job.now) is not None
    job.wait(0.6)
    assert job.generation == 2
    assert unsound(job) == UnsoundSteps(generation=1, after=55, found_at=57)
    assert job.incident.culprit == 1
    job.bad_loss(0, 57, generation=1)
    assert (job.generation, job.state.bad_numbers) == (2, ())


def test_ranks_that_take_in_the_loss_of_another_one_a_step_later_have_not_failed_by_themselves():
    job = scenario().bad_loss(0, 58).bad_loss(1, 57)
    assert (job.incident.culprit, job.incident.also_failed) == (1, ())
    job = scenario().bad_loss(0, 57).bad_loss(1, 57)
    assert (job.incident.culprit, job.incident.also_failed) == (0, (1,))


def test_a_script_that_ends_because_of_its_loss_goes_back_too():
    job = scenario().bad_loss(1, 57).rank_raised(1, "AssertionError: loss is nan")
    assert job.generation == 2
    assert unsound(job) == UnsoundSteps(generation=1, after=55, found_at=57)
    assert job.incident.failure is FailureClass.NUMERIC


def test_a_node_that_is_lost_in_that_moment_is_replaced_and_the_job_goes_back():
    job = scenario().bad_loss(1, 57).lost(0)
    assert job.incident.failure is FailureClass.NODE_LOST
    assert job.incident.action.endswith("; load a state of step 55 or before")
    job.removed(0).ready(0)
    assert unsound(job) == UnsoundSteps(generation=1, after=55, found_at=57)


def test_later_worlds_do_not_load_it_either_and_what_they_save_is_new():
    job = scenario().bad_loss(0, 57).bad_loss(1, 57).steps()
    job.rank_killed(0).steps()
    assert job.generation == 3
    assert unsound(job) == UnsoundSteps(generation=1, after=55, found_at=57)


def test_a_second_return_adds_to_what_the_first_one_left_out():
    job = scenario().bad_loss(0, 57).bad_loss(1, 57).steps()
    job.bad_loss(0, 67).bad_loss(1, 67).steps()
    assert job.generation == 3
    found = unsound(job)
    assert found is not None
    first = UnsoundSteps(generation=1, after=55, found_at=57)
    assert found == UnsoundSteps(generation=2, after=65, found_at=67, earlier=(first,))
    sound = {(1, 55): True, (1, 56): False, (1, 66): False, (2, 56): True, (2, 66): False, (3, 66): True}
    assert {of: not found.has(generation=of[0], step=of[1]) for of in sound} == sound
    job.bad_loss(0, 57).bad_loss(1, 57)
    assert job.incident.rule == 'bad-number/2 "the same again after going back"'


def test_a_loss_that_is_bad_again_at_the_same_step_stops_the_job():
    job = scenario().bad_loss(0, 57).bad_loss(1, 57).steps()
    job.bad_loss(0, 57).bad_loss(1, 57)
    outcome = job.state.outcome
    assert outcome is not None
    assert (outcome.phase, outcome.exit_code) == (JobPhase.FAILED, 1)
    assert outcome.reason == (
        "the loss of rank 0 is nan at step 57, and it was no number at step 57 before the job went back"
    )
    assert job.incident.rule == 'bad-number/2 "the same again after going back"'


def test_a_later_step_is_another_loss_until_the_budget_is_used_up():
    job = scenario(retry={"max_restarts": 2})
    for step in (57, 67, 77):
        assert job.state.outcome is None
        job.bad_loss(0, step, progress=reported(step)).bad_loss(1, step)
        job.wait(60).steps()
    assert job.state.restart_count == 2
    assert job.state.outcome is not None
    assert "use up retry.max_restarts" in job.state.outcome.reason


def test_a_late_report_of_the_world_that_the_job_goes_back_from_is_not_another_one():
    job = scenario(nodes="3").bad_loss(1, 57).bad_loss(2, 57).lost(0)
    assert (job.generation, job.state.outcome) == (1, None)
    job.take(job.failure(2, ranks=()))
    job.bad_loss(2, 58)
    assert job.state.outcome is None
    job.removed(0).ready(0)
    assert job.generation == 2
    assert unsound(job) == UnsoundSteps(generation=1, after=55, found_at=57)


def test_a_stage_that_ends_in_that_moment_is_complete():
    job = scenario().bad_loss(1, 57)
    job.finish(0, 1).wait(60)
    assert job.state.complete_generation == 1
    assert job.state.interruption is None


def test_actions_without_anything_to_load_say_so():
    assert words((RestartRanks(), RollBack(after=-1))).endswith("; load no state of this run")


# stop


def test_a_job_that_is_to_stop_does_so_at_once():
    job = scenario("stop").bad_loss(1, 57)
    assert job.state.outcome is not None
    assert job.state.outcome.exit_code == 1
    assert job.state.outcome.reason == "the loss of rank 1 is nan at step 57, and recovery.on_nan is stop"


# claims


def test_numbers_of_other_nodes_ranks_and_other_worlds_are_not_believed():
    job = scenario().bad_loss(1, 57, global_rank=0).bad_loss(0, 57, global_rank=7)
    assert job.state.wrong_claims == 2
    job.bad_loss(1, 57, generation=9).wait(60)
    assert (job.generation, job.state.bad_numbers) == (1, ())


def test_a_loss_while_a_request_waits_keeps_the_next_world_from_what_it_spoiled():
    job = scenario().take(RelaunchRequested(rank=1))
    job.bad_loss(0, 57, last_finite=56).wait(2)
    job.those_that_leave_end().ready(1).wait(1)
    assert job.generation == 2
    assert unsound(job) == UnsoundSteps(generation=1, after=55, found_at=57)
