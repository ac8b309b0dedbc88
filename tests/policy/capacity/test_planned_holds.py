"""Changes that are planned wait until the ranks of a split state stand at a step that is safe in memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from perdure.cli.explain import explanation
from perdure.contract import (
    AwaitNodes,
    HoldRequest,
    JobPhase,
    ReplaceNodes,
    RestoreSource,
    ScaleRequest,
    SnapshotUse,
)
from perdure.contract.transitions import NodeEnding
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import state_loss
from perdure.workflows.policy.facts.events import (
    RelaunchRequested,
    ScaleRequested,
    TimePassed,
)
from perdure.workflows.policy.record.projections import next_action, warnings_of
from perdure.workflows.requests import check_scale
from tests.policy.capacity.holds import ALONE, PROBLEM, SPLIT, STORAGE, changes, held, hold, size, training
from tests.policy.capacity.test_planned_changes import make_durable
from tests.policy.checkpoints.test_commits import restored
from tests.policy.scenario import Scenario


def test_a_world_shrinks_once_its_ranks_wait_at_a_step_with_copies():
    job = training().take(ScaleRequested(minimum=2, maximum=2))
    assert hold(job) == HoldRequest(number=1, generation=1, resizes=True, copies=True)
    assert "the ranks wait at one of the next steps, then the world shrinks from 3 to 2 nodes" in next_action(
        job.state, job.job
    )
    held(job)
    assert (job.generation, hold(job) is not None) == (1, True), "until the node that leaves has ended"
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)
    assert hold(job) == HoldRequest(number=1, generation=1, resizes=True, copies=True), "none of its ranks trains on"
    assert any("all ranks waited at step 40" in one.text for one in job.incident.evidence)
    assert not any("requested at" in one.text for one in job.incident.evidence)


def test_a_world_grows_once_its_ranks_wait_at_a_step_and_needs_no_copies_for_it():
    job = training("2", use=ALONE).take(ScaleRequested(minimum=2, maximum=3))
    job.ready(2)
    assert hold(job) == HoldRequest(number=1, generation=1, resizes=True)
    held(job)
    assert (job.generation, size(job)) == (2, 3)


def test_a_world_that_has_not_said_yet_how_it_keeps_its_state_does_it_as_the_one_before():
    job = training("2", use=SPLIT).take(ScaleRequested(minimum=2, maximum=3)).ready(2)
    held(job).steps()
    assert [node.snapshots_in for node in job.state.members] == [1, 1, 0]
    job.take(ScaleRequested(minimum=2, maximum=2))
    assert hold(job) == HoldRequest(number=2, generation=2, resizes=True, copies=True)


def test_the_ranks_wait_only_once_the_checkpoint_in_storage_is_durable():
    job = training(**STORAGE).take(ScaleRequested(minimum=2, maximum=2))
    assert hold(job) is None
    make_durable(job, answers=1)
    assert (hold(job), job.generation) == (HoldRequest(number=1, generation=1, resizes=True, copies=True), 1)
    held(job)
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)
    texts = [one.text for one in job.incident.evidence]
    assert any("is durable" in text for text in texts)
    assert any("no step is lost" in text for text in texts)


def test_a_change_is_not_made_where_the_state_would_be_lost():
    job = training().take(ScaleRequested(minimum=2, maximum=2))
    held(job, problem=PROBLEM)
    assert (job.generation, size(job), hold(job), job.state.phase) == (1, 3, None, JobPhase.RUNNING)
    [warning] = warnings_of(job.state, job.job)
    remedy = f"`perdure scale {job.state.name} N --older` does it nevertheless"
    assert warning.endswith(f"not done, since the state would be lost: {PROBLEM}; {remedy}")
    assert warning in next_action(job.state, job.job)
    job.wait(timedelta(minutes=11))
    assert hold(job) == HoldRequest(number=2, generation=1, resizes=True, copies=True)
    held(job, problem=PROBLEM)
    job.take(ScaleRequested(minimum=3, maximum=3))
    assert not warnings_of(job.state, job.job)
    assert (job.generation, size(job)) == (1, 3)


def test_a_refused_change_is_explained_once_with_its_reason_and_remedy():
    job = training().take(ScaleRequested(minimum=2, maximum=2))
    held(job, problem=PROBLEM)
    job.wait(timedelta(minutes=11))
    held(job, problem=PROBLEM)
    [entry] = [one for one in job.state.incidents if one.observation is not None and one.observation.refused_change]
    text = explanation(entry, job="llama", flag="").plain
    assert "the world shrinks from 3 to 2 nodes: not done" in text
    assert PROBLEM in text
    assert "perdure scale llama N --older" in text


def test_a_change_that_was_refused_is_refused_at_the_request_and_made_where_a_user_accepts_less():
    job = training().take(ScaleRequested(minimum=2, maximum=2))
    held(job, problem=PROBLEM)
    with pytest.raises(ApplicationError, match="With --older it is done nevertheless"):
        check_scale(job.whole, job.job, ScaleRequest(nodes="2"))
    check_scale(job.whole, job.job, ScaleRequest(nodes="2", older=True))
    job.take(ScaleRequested(minimum=2, maximum=2, older=True))
    assert hold(job) is not None
    held(job, problem=PROBLEM)
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)
    known = state_loss.known_states(job.state, job.job, job.state.world.members if job.state.world else ())
    assert known is not None
    assert known.accepts_less
    assert any("the change was made nevertheless" in one.text for one in job.incident.evidence)


def accepts_less(job: Scenario) -> bool:
    """Whether the ranks of the current world continue with less than existed."""
    known = job.state.world.known if job.state.world is not None else None
    return known is not None and known.accepts_less


def test_an_older_state_is_taken_by_the_change_for_which_a_user_takes_it_and_by_no_world_of_the_same_size():
    job = training("2", **STORAGE)
    restored(job, generation=1)
    make_durable(job.take(ScaleRequested(minimum=2, maximum=3, older=True)))
    job.rank_killed(1)
    assert (job.generation, accepts_less(job)) == (2, False), "it waits where the storage is away"
    restored(job, generation=2, step=40, source=RestoreSource.MEMORY).steps()
    job.ready(2)
    make_durable(job, step=41, answers=job.state.checkpoints.requests)
    held(job, problem=PROBLEM)
    assert (job.generation, size(job), accepts_less(job)) == (3, 3, True)
    restored(job, generation=3, step=41, source=RestoreSource.STORAGE).steps()
    job.rank_killed(1)
    assert (job.generation, accepts_less(job)) == (4, False), "the change was made"


def test_a_later_request_takes_no_older_state_unless_it_says_so():
    job = training("2").take(ScaleRequested(minimum=2, maximum=4, older=True))
    job.take(ScaleRequested(minimum=2, maximum=3)).ready(2)
    held(job, problem=PROBLEM)
    assert (job.generation, size(job)) == (1, 2)


def test_no_change_is_refused_where_the_job_takes_older_states():
    job = training(use=ALONE, recovery={"on_state_loss": "older"})
    check_scale(job.whole, job.job, ScaleRequest(nodes="2"))
    job = training(recovery={"on_state_loss": "older"}).take(ScaleRequested(minimum=2, maximum=2))
    held(job, problem=PROBLEM)
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)


def test_older_goes_with_a_number_of_nodes():
    with pytest.raises(ApplicationError, match="older: given without nodes"):
        check_scale(training().whole, training().job, ScaleRequest(older=True, scaling={"policy": "max"}))


def test_a_change_does_not_wait_for_ranks_that_do_not_come_to_a_step():
    job = training().take(ScaleRequested(minimum=2, maximum=2)).wait(timedelta(minutes=3)).those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)
    assert any("did not wait at a step in time" in one.text for one in job.incident.evidence)


def test_parts_without_copies_are_not_given_up():
    job = training(use=ALONE)
    with pytest.raises(ApplicationError, match="the job has no checkpoint"):
        check_scale(job.whole, job.job, ScaleRequest(nodes="2"))
    check_scale(job.whole, job.job, ScaleRequest(nodes="4"))
    job.take(ScaleRequested(minimum=2, maximum=2))
    assert (job.generation, hold(job)) == (1, None)
    assert "`copies=0`" in next_action(job.state, job.job)


def test_parts_without_copies_wait_for_the_replacement_of_a_lost_node_which_may_find_them_on_its_machine():
    job = training("2:3", use=ALONE).lost(2)
    assert (job.generation, job.state.phase) == (1, JobPhase.WAITING)
    assert [type(one) for one in job.incident.actions] == [ReplaceNodes, AwaitNodes]
    assert any("`copies=0`" in one.why_not for one in job.incident.considered)
    job.removed(2).ready(2)
    assert (job.generation, size(job)) == (2, 3)


def test_without_a_replacement_it_goes_on_with_fewer_after_the_time_that_recovery_gives_it():
    job = training("2:3", use=ALONE).lost(2).wait(timedelta(minutes=11))
    assert (job.generation, size(job)) == (2, 2)


def test_a_node_is_replaced_once_the_ranks_wait_with_its_copies():
    job = training().take(RelaunchRequested(rank=1))
    assert hold(job) == HoldRequest(number=1, generation=1, copies=True)
    assert job.node(1).incarnation == 1
    held(job)
    assert job.node(1).incarnation == 2


def test_a_node_that_is_to_leave_while_the_world_waits_to_grow_has_the_copies_waited_for():
    job = training("2").take(ScaleRequested(minimum=2, maximum=3)).ready(2)
    assert hold(job) == HoldRequest(number=1, generation=1, resizes=True)
    job.take(RelaunchRequested(rank=1))
    assert hold(job) == HoldRequest(number=2, generation=1, resizes=True, copies=True)
    held(job, number=1)
    assert (job.generation, job.node(1).incarnation) == (1, 1)
    held(job)
    assert job.node(1).incarnation == 2


def test_a_node_that_another_party_ends_is_released_once_its_copies_are_elsewhere():
    job = training()
    job.transition(1, NodeEnding, generation=1, detail="drained")
    assert hold(job) is not None
    assert not job.node(1).released
    held(job, problem="a node has no room")
    assert job.node(1).released


@pytest.mark.parametrize(
    "job",
    [
        training(use=None),
        training(use=SnapshotUse(replicated=True, copies=0)),
    ],
    ids=["unknown", "replicated"],
)
def test_ranks_that_need_not_wait_are_not_waited_for(job: Scenario):
    job.take(ScaleRequested(minimum=2, maximum=2)).those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)


@pytest.mark.parametrize("spec", [{}, STORAGE], ids=["memory", "storage"])
def test_ranks_of_the_world_after_a_failure_wait_for_the_copies_of_a_node_that_is_replaced(spec: dict[str, Any]):
    job = training(**spec).take(RelaunchRequested(rank=1))
    job.rank_killed(0)
    assert job.generation == 2
    job.steps()
    if spec:
        make_durable(job, answers=1)
    request = hold(job)
    assert request is not None
    assert (request.generation, request.copies) == (2, True)
    assert job.node(1).incarnation == 1
    held(job, step=44)
    assert job.node(1).incarnation == 2
    assert any("all ranks waited at step 44" in one.text for one in job.incident.evidence)


def test_ranks_wait_for_no_replacement_of_a_node_that_a_failure_has_replaced():
    job = training().take(RelaunchRequested(rank=1)).lost(1).removed(1).ready(1).steps()
    request = hold(job)
    assert (job.generation, job.node(1).incarnation) == (2, 2)
    assert request is None or request.generation == 1
    job.wait(timedelta(minutes=3))
    assert (job.generation, job.node(1).incarnation, job.state.postponed) == (2, 2, None)


@pytest.mark.parametrize(
    "change", [ScaleRequested(minimum=2, maximum=2), RelaunchRequested(rank=2)], ids=["scale", "relaunch"]
)
def test_ranks_that_have_trained_on_while_no_worker_was_there_wait_once_more(change: Any):
    job = training().take(change)
    asked_at = job.now
    job.now += timedelta(seconds=90)
    held(job, time=asked_at + timedelta(seconds=5))
    assert (job.generation, job.node(2).incarnation) == (1, 1), "they had trained on after a minute"
    request = hold(job)
    assert request is not None
    assert request.number == 2
    held(job, step=90)
    job.those_that_leave_end()
    assert changes(job) == ["all ranks waited at step 90 until it was safe in memory: no step is lost"]


def test_ranks_of_a_node_whose_clock_is_late_are_not_taken_to_have_trained_on():
    job = training().take(ScaleRequested(minimum=2, maximum=2)).wait(5)
    held(job, time=job.now - timedelta(minutes=10))
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)
    assert changes(job) == ["all ranks waited at step 40 until it was safe in memory: no step is lost"]


def test_a_change_whose_worker_is_always_late_is_made_and_claims_no_step():
    job = training().take(ScaleRequested(minimum=2, maximum=2))
    for _ in range(4):
        assert hold(job) is not None
        asked_at = job.now
        job.now += timedelta(minutes=5)
        held(job, time=asked_at + timedelta(seconds=5))
    job.those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)
    [text] = changes(job)
    assert text.startswith("all ranks waited at step 40, and had trained on when the change was made")


def test_a_change_that_was_refused_is_not_begun_again_before_its_time():
    job = training().take(ScaleRequested(minimum=2, maximum=2))
    held(job, problem=PROBLEM)
    job.now += timedelta(minutes=5)
    job.take(TimePassed())
    assert (hold(job), job.generation) == (None, 1)


def test_an_answer_of_another_world_or_request_counts_for_nothing():
    job = training().take(ScaleRequested(minimum=2, maximum=2))
    held(job, number=7)
    assert job.generation == 1
    job.take(ScaleRequested(minimum=3, maximum=3))
    assert (hold(job), job.state.postponed) == (None, None)
    assert (job.generation, job.state.phase) == (1, JobPhase.RUNNING)


def test_an_older_run_does_not_wait():
    job = training()
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    job.take(ScaleRequested(minimum=2, maximum=2)).those_that_leave_end()
    assert (job.generation, size(job)) == (2, 2)
