"""Changes that are planned wait for a checkpoint, for a bounded time; failures and jobs without a storage do not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from perdure.contract import JobPhase, NodePhase, NodeView
from perdure.contract.transitions import NodeCommittedCheckpoint, NodeEnding
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import commits
from perdure.workflows.policy.decide import decide_all
from perdure.workflows.policy.facts.events import (
    CancelRequested,
    CheckpointRequested,
    Event,
    GroupAdopted,
    RelaunchRequested,
    ResumeRequested,
    ScaleRequested,
    SuspendRequested,
)
from perdure.workflows.policy.record.projections import next_action, warnings_of
from perdure.workflows.policy.roles import suspension
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.checkpoints.test_commits import committed, decision, scenario, stored
from tests.policy.scenario import Scenario

SUSPEND = SuspendRequested(reason="making room")


def request(job: Scenario) -> int:
    return desires_of(job.state)[0].checkpoint_request


def make_durable(job: Scenario, *, step: int = 30, **facts: Any) -> Scenario:
    assert job.state.world is not None
    for rank in job.state.world.members:
        stored(job, rank, step=step, **facts)
    commit = decision(job)
    assert commit is not None
    return committed(job)


def test_a_job_is_suspended_once_its_checkpoint_is_durable():
    job = scenario().take(SUSPEND)
    assert (job.state.phase, request(job)) == (JobPhase.RUNNING, 1)
    assert "a checkpoint, then the job is suspended, at " in next_action(job.state, job.job)
    make_durable(job, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED
    assert request(job) == 0
    texts = [one.text for one in job.incident.evidence]
    assert any("the checkpoint of step 30, requested at" in text for text in texts)
    assert "suspended by a user: making room" in texts


def test_a_scheduled_checkpoint_that_was_on_its_way_is_not_enough():
    job = scenario().take(SUSPEND)
    make_durable(job, step=10, answers=0)
    assert job.state.phase is JobPhase.RUNNING
    make_durable(job, step=12, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED


@pytest.mark.parametrize("problem", ["", "s3://ckpt: away"])
def test_a_change_does_not_wait_longer_than_it_is_told(problem: str):
    job = scenario(save_timeout="40s").take(SUSPEND)
    if problem:
        stored(job, 0, problem=problem)
    job.wait(39)
    assert job.state.phase is JobPhase.RUNNING
    job.wait(2)
    assert job.state.phase is JobPhase.SUSPENDED
    [text] = [one.text for one in job.incident.evidence if "not durable in time" in one.text]
    assert text.endswith(problem or "the ranks reported none")


@pytest.mark.parametrize("stored_meanwhile", [False, True])
def test_a_change_whose_time_is_over_while_no_worker_was_there_waits_for_another_checkpoint(stored_meanwhile: bool):
    job = scenario(save_timeout="40s").take(SUSPEND)
    job.now += timedelta(minutes=5)
    if stored_meanwhile:
        # The ranks have saved it, have waited in vain for their end, and have trained on.
        for rank in (0, 1):
            stored(job, rank, step=30, answers=1)
    job.wait(0)
    assert (job.state.phase, request(job)) == (JobPhase.RUNNING, 2)
    if stored_meanwhile:
        committed(job)
        assert job.state.phase is JobPhase.RUNNING
    make_durable(job, step=42, answers=2)
    assert job.state.phase is JobPhase.SUSPENDED
    assert any("the checkpoint of step 42" in one.text for one in job.incident.evidence)


@pytest.mark.parametrize("change", [SUSPEND, RelaunchRequested(rank=0)], ids=["suspend", "relaunch"])
def test_a_change_waits_for_ranks_that_a_failure_has_ended_while_no_worker_was_there(change: Event):
    job = scenario(save_timeout="40s").take(change)
    job.now += timedelta(minutes=5)
    job.rank_killed(1)
    assert (job.state.phase, job.node(0).incarnation) == (JobPhase.RECOVERING, 1)
    job.peer_failed(0).steps()
    assert (job.generation, request(job), job.node(0).incarnation) == (2, 1, 1)
    make_durable(job, answers=1)
    assert (job.state.phase is JobPhase.SUSPENDED) == (change is SUSPEND)
    assert job.node(0).alive == (change is not SUSPEND)
    assert any("the checkpoint of step 30" in one.text for one in job.incident.evidence)


def test_a_failure_in_an_outage_keeps_no_job_from_being_suspended_for_long():
    job = scenario(save_timeout="40s").take(SUSPEND)
    job.now += timedelta(minutes=5)
    job.lost(1)
    assert job.state.phase is not JobPhase.SUSPENDED
    job.wait(timedelta(seconds=39))
    assert job.state.phase is not JobPhase.SUSPENDED
    job.wait(timedelta(seconds=2))
    assert job.state.phase is JobPhase.SUSPENDED


def test_workers_that_are_always_late_keep_no_job_from_being_suspended():
    job = scenario(save_timeout="40s").take(SUSPEND)
    for _ in range(4):
        assert job.state.phase is JobPhase.RUNNING
        job.now += timedelta(minutes=5)
        job.wait(0)
    assert job.state.phase is JobPhase.SUSPENDED


@pytest.mark.parametrize(
    "job",
    [
        Scenario("2").running(),
        scenario(save_timeout="0s"),
        Scenario("2", checkpoint={"storage": "file:///ckpt"}).ready(0, 1),
    ],
    ids=["no storage", "switched off", "no step yet"],
)
def test_where_nothing_is_saved_nothing_waits(job: Scenario):
    job.take(SUSPEND)
    assert job.state.phase is JobPhase.SUSPENDED
    assert request(job) == 0


def test_a_script_that_uses_no_checkpointer_is_not_waited_for():
    job = scenario().steps(saves=False)
    assert any("use a Checkpointer" in warning for warning in warnings_of(job.state, job.job))
    job.take(SUSPEND)
    assert job.state.phase is JobPhase.SUSPENDED
    assert request(job) == 0


@pytest.mark.parametrize("how", ["it saves", "it saves later", "an older agent", "an older world"])
def test_a_script_that_may_save_is_waited_for(how: str):
    match how:
        case "it saves":
            job = scenario().steps(saves=True)
        case "it saves later":
            job = scenario().steps(saves=False)
            make_durable(job)
        case "an older agent":
            job = scenario().steps()
        case _:
            job = scenario().steps(saves=False).rank_killed(1).steps(saves=True)
    assert not warnings_of(job.state, job.job)
    job.take(SUSPEND)
    assert (job.state.phase, request(job)) == (JobPhase.RUNNING, 1)


def test_a_broken_world_is_not_waited_for():
    job = scenario().rank_killed(1)
    job.take(SUSPEND)
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_failure_while_it_waits_costs_no_request():
    job = scenario().take(SUSPEND)
    job.rank_killed(1).peer_failed(0)
    assert job.generation == 2
    assert request(job) == 1
    job.steps()
    make_durable(job, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_job_whose_nodes_are_all_lost_meanwhile_is_suspended():
    job = scenario().take(SUSPEND)
    job.lost_together(0, 1)
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_resume_withdraws_what_still_waits():
    job = scenario().take(SUSPEND)
    assert suspension.is_awaited(job.whole)
    job.take(ResumeRequested())
    assert not suspension.is_awaited(job.whole)
    make_durable(job, answers=1)
    job.wait(300)
    assert job.state.phase is JobPhase.RUNNING
    assert job.generation == 1


def test_a_cancelled_job_does_not_wait():
    job = scenario().take(SUSPEND)
    job.take(CancelRequested())
    assert job.state.outcome is not None


def test_a_node_is_replaced_once_the_checkpoint_is_durable():
    job = scenario()
    job.take(RelaunchRequested(rank=1))
    job.take(RelaunchRequested(rank=1))
    assert job.node(1).incarnation == 1
    make_durable(job, answers=1)
    assert job.node(1).incarnation == 2
    assert request(job) == 0


def test_a_node_that_was_replaced_meanwhile_is_not_replaced_again():
    job = scenario()
    job.take(RelaunchRequested(rank=1))
    job.lost(1)
    assert job.node(1).incarnation == 2
    job.removed(1).ready(1).steps()
    job.wait(120)
    assert job.node(1).incarnation == 2
    assert job.state.postponed is None


@pytest.mark.parametrize(
    ("event", "size"), [(ScaleRequested(minimum=2, maximum=2), 2), (ScaleRequested(minimum=2, maximum=4), 4)]
)
def test_a_world_grows_and_shrinks_after_its_checkpoint(event: Event, size: int):
    job = scenario("3").take(event)
    if size == 4:
        assert request(job) == 0, "there is no node to grow with yet"
        job.ready(3)
    assert (request(job), job.generation) == (1, 1)
    make_durable(job, answers=1)
    job.those_that_leave_end()
    assert job.state.world is not None
    assert (job.generation, job.state.world.nodes) == (2, size)
    assert job.state.postponed is None
    assert any("requested at" in one.text for one in job.incident.evidence)
    job.steps().wait(timedelta(hours=1))
    assert job.generation == 2


def test_a_world_that_has_nothing_to_grow_with_any_more_waits_for_nothing():
    job = scenario("2").take(ScaleRequested(minimum=2, maximum=3)).ready(2)
    assert job.state.postponed is not None
    job.lost(2)
    assert job.state.postponed is None
    assert job.node(2).phase is NodePhase.REQUESTED


def ending(job: Scenario, rank: int) -> Scenario:
    return job.transition(rank, NodeEnding, generation=job.generation, detail="the launcher got SIGTERM")


def released(job: Scenario) -> list[int]:
    return [rank for rank, node in desires_of(job.state)[0].nodes.items() if node.released]


def test_a_node_that_another_party_ends_is_released_once_its_checkpoint_is_durable():
    job = ending(ending(scenario("3"), 1), 2)
    assert (released(job), request(job)) == ([], 1)
    assert "node 1 ends, as the launcher got SIGTERM" in next_action(job.state, job.job)
    make_durable(job, answers=1)
    assert released(job) == [1, 2]
    job.ended_from_outside(1).lost_together(1, 2)
    assert released(job) == []
    assert job.node(1).incarnation == 2


def test_a_node_that_cannot_save_is_released_at_once():
    assert released(ending(Scenario("2").running(), 1)) == [1]
    assert released(ending(scenario(save_timeout="0s"), 0)) == [0]
    assert released(ending(scenario().take(SUSPEND).take(CancelRequested()), 0)) == []


def test_a_node_that_ended_before_its_checkpoint_was_durable_changes_nothing_else():
    job = ending(scenario(), 1)
    job.ended_from_outside(1).lost(1)
    assert job.node(1).incarnation == 2
    job.removed(1).ready(1).steps()
    make_durable(job, answers=1)
    assert released(job) == []
    assert job.state.phase is JobPhase.RUNNING


def test_requests_of_users_count_together():
    job = scenario()
    job.take(CheckpointRequested())
    job.take(SUSPEND)
    make_durable(job, answers=1)
    assert job.state.phase is JobPhase.RUNNING
    make_durable(job, answers=2, step=40)
    assert job.state.phase is JobPhase.SUSPENDED


def save(job: Scenario, place: str, *, step: int, answers: int = 0, beside: tuple[str, ...] = ()) -> Scenario:
    """All nodes store a checkpoint of one of the script's checkpointers, and it is committed."""
    for rank in (0, 1):
        stored(job, rank, step=step, place=place, answers=answers, beside=beside)
    return committed(job)


def test_a_job_with_two_checkpointers_is_suspended_once_both_have_saved():
    job = scenario()
    save(save(job, "model", step=7), "buffer", step=7).take(SUSPEND)
    save(job, "model", step=30, answers=1)
    assert job.state.phase is JobPhase.RUNNING
    save(job, "buffer", step=30, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED


def test_two_checkpointers_that_save_for_the_first_time_are_both_waited_for():
    job = scenario().take(SUSPEND)
    for rank in (0, 1):
        for place in ("model", "buffer"):
            stored(job, rank, place=place, answers=1)
    committed(job)
    assert job.state.phase is JobPhase.RUNNING
    committed(job)
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_small_state_that_is_stored_before_a_part_of_a_large_one_is_suspends_no_job():
    job = scenario().take(SUSPEND)
    save(job, "average", step=30, answers=1, beside=("model",))
    assert job.state.phase is JobPhase.RUNNING
    save(job, "model", step=30, answers=1, beside=("average",))
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_small_state_that_is_stored_again_while_a_large_one_still_is_suspends_no_job():
    job = scenario()
    save(save(job, "model", step=1, beside=("average",)), "average", step=1, beside=("model",))
    save(job, "average", step=20, beside=("model",)).take(SUSPEND)
    save(job, "average", step=30, answers=1, beside=("model",))
    assert job.state.phase is JobPhase.RUNNING
    save(job, "model", step=30, answers=1, beside=("average",))
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_checkpointer_that_stores_nothing_in_time_is_named_with_what_is_durable():
    job = scenario(save_timeout="40s")
    save(save(job, "model", step=1), "average", step=1).take(SUSPEND)
    save(job, "model", step=30, answers=1, beside=("average",))
    assert job.wait(41).state.phase is JobPhase.SUSPENDED
    [text] = [one.text for one in job.incident.evidence if "was not durable in time" in one.text]
    assert text.endswith(
        "step 30 is durable, and the script's other checkpointers, such as 'average', have stored none since"
    )


def test_states_of_two_worlds_suspend_no_job():
    job = scenario().take(SUSPEND)
    save(job, "average", step=30, answers=1, beside=("model",))
    job.rank_killed(1).steps()
    save(job, "model", step=33, answers=1, beside=("average",))
    assert job.state.phase is JobPhase.RUNNING
    save(job, "average", step=33, answers=1, beside=("model",))
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_checkpointer_whose_training_is_over_is_not_waited_for():
    job = scenario()
    save(job, "fold-1", step=100)
    save(save(job, "fold-2", step=1), "fold-2", step=2).take(SUSPEND)
    save(job, "fold-2", step=3, answers=1)
    assert job.state.phase is JobPhase.SUSPENDED


def test_a_replacement_that_is_due_is_not_forgotten_for_a_node_that_ends_at_the_same_moment():
    job = scenario().take(RelaunchRequested(rank=0))
    for rank in (0, 1):
        stored(job, rank, answers=1)
    commit, node = decision(job), job.node(1)
    assert commit is not None
    events = (
        NodeCommittedCheckpoint(
            rank=commit.rank, incarnation=1, time=job.now, generation=1, checkpoint=commit.checkpoint
        ),
        NodeEnding(rank=1, incarnation=node.incarnation, time=job.now, generation=1, detail="drained"),
    )
    job.whole = decide_all(job.whole, events, job.job, job.now, new_token=uuid4, dropped=pytest.fail)
    make_durable(job, step=31, answers=2)
    assert job.node(0).incarnation == 2


def reset(job: Scenario) -> Scenario:
    """It has forgotten what has happened since; its ranks and agents have not."""
    job.whole = job.whole.with_view(commits.renumber(job.state, job.now))
    return job


def test_a_job_that_was_reset_gives_no_number_again_of_a_checkpoint_that_it_has_forgotten():
    followed = request(scenario().take(SUSPEND))
    job = reset(scenario()).take(SUSPEND)
    assert request(job) > followed > 0
    make_durable(job, answers=followed)
    assert job.state.phase is JobPhase.RUNNING, "that was the answer to another request"
    make_durable(job, step=31, answers=request(job))
    assert job.state.phase is JobPhase.SUSPENDED


@pytest.mark.parametrize("change", [SUSPEND, RelaunchRequested(rank=1)], ids=["suspend", "relaunch"])
def test_a_checkpoint_whose_answer_a_reset_job_may_have_forgotten_is_requested_again(change: Event):
    job = scenario().take(change)
    number, until = request(job), job.state.postponed.until if job.state.postponed else None
    reset(job)
    assert request(job) > number
    assert job.state.postponed is not None
    assert (job.state.postponed.checkpoint_request, job.state.postponed.until) == (request(job), until)
    make_durable(job, step=31, answers=request(job))
    assert job.state.postponed is None
    assert any("the checkpoint of step 31, requested at" in one.text for one in job.incident.evidence)


def test_a_checkpoint_that_has_answered_is_not_requested_again_after_a_reset():
    job = make_durable(scenario().take(CheckpointRequested()), answers=1)
    assert request(reset(job)) == 0
    assert job.state.postponed is None
    assert request(job.take(CheckpointRequested())) > 1


def test_a_job_that_begins_with_nodes_that_it_had_gives_no_number_that_their_agents_know():
    job = Scenario("2", checkpoint={"storage": "file:///ckpt"}).take(CheckpointRequested())
    node = NodeView(rank=0, incarnation=1, phase=NodePhase.READY, since=job.now, token="theirs", generation=4)
    job.take(GroupAdopted(group=0, nodes=(node,)))
    number = request(job)
    assert number > 10**9
    job.take(CheckpointRequested())
    assert request(job) == number + 1


def test_a_run_of_an_earlier_release_keeps_its_numbers():
    job = scenario()
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    assert request(reset(job).take(CheckpointRequested())) == 1
