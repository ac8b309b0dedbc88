"""Tests of ranks that end the same way soon after each start, with an exit code that blames nobody."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from perdure.contract import FailureClass, LossCause
from perdure.contract.transitions import NodeJoined
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.facts.events import RestartRequested, ResumeRequested, ScaleRequested, SuspendRequested
from perdure.workflows.policy.record.projections import next_action
from perdure.workflows.policy.state.budget import backoff
from tests.policy.scenario import Scenario


def job_of_two(**retry: int) -> Scenario:
    return Scenario("2", retry=retry).ready(0, 1)


def test_a_script_that_is_killed_at_once_each_time_is_tried_with_growing_pauses_and_stops_as_its_own_fault():
    job = job_of_two()
    pauses: list[float] = []
    while job.state.outcome is None:
        before, killed_at = job.generation, job.now
        job.wait(1).rank_killed(1)
        while job.state.outcome is None and job.generation == before:
            job.wait(1)
        pauses.append((job.now - killed_at).total_seconds() - 1)
    assert pauses == [0, 5, 10, 0]
    assert job.state.outcome.exit_code == 1
    assert job.state.outcome.reason.startswith(
        "it ended the same way 4 times in a row, soon after the start and without a step: "
    )
    assert job.incident.failure is FailureClass.KILLED
    assert job.incident.rule.startswith("same-end/1")


def test_the_limit_is_that_of_restarts_without_progress():
    job = job_of_two(no_progress_limit=1)
    job.wait(1).rank_killed(1).wait(1).rank_killed(1)
    assert job.state.outcome is not None


def test_an_exit_code_that_each_node_may_report_first_is_the_same_end():
    job = job_of_two()
    starts = 0
    while job.state.outcome is None:
        generation, order = job.generation, ((0, 1), (1, 0))[starts % 2]
        starts += 1
        job.wait(1)
        for rank in order:
            job.rank_raised(rank, None, exit_code=137, generation=generation)
        job.wait(30)
    assert (starts, job.state.outcome.exit_code) == (4, 1)
    assert job.incident.rule.startswith("same-end/1")


def test_a_patient_job_pauses_for_five_minutes_at_most_and_says_until_when():
    job = job_of_two(no_progress_limit=100, max_restarts=100)
    for _ in range(12):
        generation = job.generation
        job.wait(1).rank_killed(1)
        if job.generation == generation:
            until = job.now + backoff(job.state.memory.early_end.times + 1 if job.state.memory.early_end else 1)
            expected = f"restarts the ranks at {until:%H:%M:%S} UTC: they have ended the same way "
            assert next_action(job.state, job.job).startswith(expected)
        job.wait(timedelta(minutes=5))
        assert job.generation == generation + 1
        assert "restarts the ranks at" not in next_action(job.state, job.job)


def test_a_restart_that_a_user_requests_ends_the_pause():
    job = job_of_two()
    for _ in range(2):
        generation = job.generation
        job.wait(1).rank_killed(1)
    assert job.generation == generation
    job.take(RestartRequested(reason="the machine has memory again"))
    assert job.generation == generation + 1
    assert job.incident.evidence[-1].text == "restart requested by a user: the machine has memory again"


def other_rank(job: Scenario) -> None:
    job.rank_killed(0)


def after_a_step(job: Scenario) -> None:
    job.steps().rank_killed(1)


def later(job: Scenario) -> None:
    job.runs().wait(timedelta(minutes=2)).rank_killed(1)


@pytest.mark.parametrize("other_end", [other_rank, after_a_step, later])
def test_any_other_end_in_between_begins_anew(other_end: Callable[[Scenario], None]):
    job = job_of_two()
    for _ in range(3):
        job.wait(1).rank_killed(1).wait(1)
        generation = job.generation
        other_end(job)
        job.wait(1)
        assert job.state.outcome is None
        assert job.generation == generation + 1, "without a pause"


def by_sigterm(job: Scenario, node: int) -> None:
    job.command_exited(node, None, signal=15)


def by_a_shell(job: Scenario, node: int) -> None:
    job.command_exited(node, 137)


@pytest.mark.parametrize("ends", [by_sigterm, by_a_shell])
def test_a_command_that_is_killed_each_time_after_its_ranks_stops_however_long_it_works(
    ends: Callable[[Scenario, int], None],
):
    job = job_of_two().steps()
    job.torchrun_finished(0, 1)
    tries = 0
    while job.state.outcome is None and tries < 10:
        first, second = ((0, 1), (1, 0))[tries % 2]
        tries += 1
        job.wait(timedelta(minutes=20))
        ends(job, first)
        if job.state.outcome is None:
            ends(job, second)
    assert job.state.outcome is not None
    assert (tries, job.state.outcome.exit_code) == (4, 1)
    assert job.state.outcome.reason.startswith("it ended the same way 4 times in a row, while its command had no ranks")
    assert job.incident.rule.startswith("same-end/3")


def test_a_command_that_is_killed_after_its_ranks_starts_again_after_growing_pauses():
    job = Scenario("1", retry={"no_progress_limit": 100, "max_restarts": 100}).running()
    job.torchrun_finished(0)
    pauses: list[float] = []
    for _ in range(3):
        restarts, killed_at = job.node(0).command_restarts, job.now
        by_sigterm(job, 0)
        if job.node(0).command_restarts == restarts:
            assert next_action(job.state, job.job).startswith("starts the command again at ")
        for _ in range(60):
            if job.node(0).command_restarts > restarts:
                break
            job.wait(1)
        pauses.append((job.now - killed_at).total_seconds())
        job.wait(timedelta(minutes=10))
    assert pauses == [0, 5, 10]


def test_a_command_that_is_killed_each_time_before_its_torchrun_stops_however_long_it_works():
    job = Scenario("1")
    tries = 0
    while job.state.outcome is None and tries < 10:
        tries += 1
        job.transition(0, NodeJoined, address="10.0.0.0", host="host-0", preparing=True)
        job.wait(timedelta(minutes=20))
        by_a_shell(job, 0)
        job.wait(timedelta(minutes=1))
    assert job.state.outcome is not None
    assert (tries, job.state.outcome.exit_code) == (4, 1)
    assert job.state.outcome.reason.startswith("it ended the same way 4 times in a row, while its command had no ranks")


def test_another_end_of_the_command_and_the_next_torchrun_begin_anew():
    job = Scenario("1").running()
    for _ in range(3):
        job.torchrun_finished(0)
        for ends in (by_sigterm, by_sigterm, by_a_shell, by_sigterm):
            job.wait(timedelta(minutes=20))
            ends(job, 0)
        job.wait(timedelta(minutes=1))
        assert job.state.outcome is None
        job.ready(0).steps()


def restart(job: Scenario) -> None:
    job.take(RestartRequested())


def scale(job: Scenario) -> None:
    job.take(ScaleRequested(minimum=2, maximum=3)).ready(2).wait(60)
    job.take(ScaleRequested(minimum=2, maximum=2)).those_that_leave_end()


def suspend(job: Scenario) -> None:
    job.take(SuspendRequested()).those_that_leave_end().take(ResumeRequested()).ready(0, 1)


def preempt(job: Scenario) -> None:
    job.lost(0, cause=LossCause.PREEMPTED).wait(1).ready(0)


@pytest.mark.parametrize("ends_otherwise", [restart, scale, suspend, preempt])
def test_a_world_in_between_that_trains_and_ends_otherwise_begins_anew(ends_otherwise: Callable[[Scenario], None]):
    job = job_of_two()
    for _ in range(5):
        generation = job.generation
        job.wait(1).rank_killed(1)
        assert job.generation == generation + 1, "without a pause"
        job.steps().wait(timedelta(hours=2))
        ends_otherwise(job)
        job.wait(1)
        assert job.generation > generation + 1
    assert job.state.outcome is None


def test_a_run_of_an_older_release_goes_on_without_pauses():
    job = job_of_two()
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    for _ in range(5):
        generation = job.generation
        job.wait(1).rank_killed(1)
        assert job.generation == generation + 1
    assert job.state.outcome is None
