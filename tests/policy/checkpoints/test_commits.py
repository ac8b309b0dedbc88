"""When a checkpoint in storage is complete, who commits it, and how often one is made."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import CheckpointRef, Commit, JobPhase, Restore, RestoreSource, Stop, StoredCheckpoint
from perdure.contract.transitions import (
    NodeCommittedCheckpoint,
    NodeRestoredCheckpoint,
    NodeStoredCheckpoint,
    NodeUnreachable,
)
from perdure.spec.checkpoint import Checkpoint
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.checkpoints import commits
from perdure.workflows.policy.facts.events import CheckpointRequested
from perdure.workflows.policy.record.projections import status_of
from perdure.workflows.policy.state.checkpoint import CheckpointState
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.scenario import Scenario

STORAGE = {"storage": "file:///ckpt"}


def scenario(nodes: str = "2", **checkpoint: object) -> Scenario:
    return Scenario(nodes, checkpoint=STORAGE | checkpoint).running()


def stored(
    job: Scenario,
    rank: int,
    *,
    step: int = 7,
    generation: int | None = None,
    problem: str = "",
    answers: int = 0,
    place: str = "",
    beside: tuple[str, ...] = (),
) -> Scenario:
    of = job.generation if generation is None else generation
    checkpoint = CheckpointRef(step=step, run="run", generation=of, place=place)
    took = timedelta(seconds=2)
    parts = StoredCheckpoint(checkpoint=checkpoint, size=100, took=took, answers=answers, beside=beside)
    return job.transition(rank, NodeStoredCheckpoint, generation=of, stored=parts, problem=problem)


def committed(job: Scenario, *, problem: str = "") -> Scenario:
    commit = decision(job)
    assert commit is not None
    return job.transition(
        commit.rank, NodeCommittedCheckpoint, generation=1, checkpoint=commit.checkpoint, problem=problem
    )


def restored(job: Scenario, *, generation: int, **facts: Any) -> Scenario:
    """The ranks of this generation report with what they continue."""
    if folder := facts.pop("folder", ""):
        facts["checkpoint"] = CheckpointRef.parse(folder)
    restore = Restore(**dict[str, Any](step=0, source=RestoreSource.UNKNOWN) | facts)
    return job.transition(0, NodeRestoredCheckpoint, generation=generation, restored=restore)


def decision(job: Scenario) -> Commit | None:
    return desires_of(job.state)[0].commit


def status(job: Scenario):
    return status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)


def test_it_is_committed_once_every_node_has_stored_its_part():
    job = scenario()
    assert decision(stored(job, 1)) is None
    commit = decision(stored(job, 0))
    assert commit is not None
    named = commit.checkpoint
    assert (named.folder, named.step, named.generation) == ("step-7-run-1", 7, 1)
    assert job.state.checkpoints.durable is None
    committed(job)
    assert decision(job) is None
    view = status(job).checkpoint
    assert (view.step, view.folder, view.size, view.took) == (7, "step-7-run-1", 200, timedelta(seconds=2))
    assert (view.committed_at, view.url) == (job.now, "file:///ckpt")


def test_a_repeated_report_counts_once():
    job = scenario()
    stored(stored(job, 1), 1)
    assert decision(job) is None
    stored(job, 0)
    committed(job)
    stored(stored(job, 0), 1)
    assert decision(job) is None
    assert status(job).checkpoint.size == 200


def test_a_world_that_is_over_commits_nothing():
    job = scenario()
    stored(job, 0)
    job.rank_killed(1).peer_failed(0)
    assert job.generation == 2
    stored(job, 1, generation=1)
    assert decision(job) is None
    stored(stored(job, 0, step=5), 1, step=5)
    commit = decision(job)
    assert commit is not None
    assert commit.checkpoint.generation == 2


def test_a_commit_of_a_world_that_is_over_is_withdrawn_and_counts_where_it_was_carried_out_before():
    job = scenario()
    stored(stored(job, 0), 1)
    commit = decision(job)
    assert commit is not None
    job.rank_killed(1).peer_failed(0)
    assert job.generation == 2
    assert decision(job) is None
    job.transition(commit.rank, NodeCommittedCheckpoint, generation=1, checkpoint=commit.checkpoint)
    assert status(job).checkpoint.folder == commit.checkpoint.folder


def going_back(*, nodes_that_stored: int) -> Scenario:
    """Step 46 is durable, step 56 stored, and the job goes back from step 57 for a loss that is no number."""
    job = Scenario("2", checkpoint=STORAGE, recovery={"on_nan": "rollback"}).running()
    committed(stored(stored(job, 0, step=46), 1, step=46))
    for rank in range(nodes_that_stored):
        stored(job, rank, step=56)
    return job.bad_loss(0, 57, last_finite=56)


@pytest.mark.parametrize("nodes_that_stored", [1, 2])
def test_what_the_job_goes_back_from_is_not_committed(nodes_that_stored: int):
    job = going_back(nodes_that_stored=nodes_that_stored)
    before = decision(job)
    # A node is lost, so that the world that went back is the present one until there is another.
    job.lost(1)
    assert job.generation == 1
    stored(job, 0, step=56)
    assert decision(job) is None
    if before is not None:
        job.transition(0, NodeCommittedCheckpoint, generation=1, checkpoint=before.checkpoint)
    job.removed(1).ready(1).steps()
    assert job.generation == 2
    assert decision(job) is None
    assert status(job).checkpoint.step == 46, "an agent that was faster has committed what is never loaded"


def test_a_part_of_what_the_job_goes_back_from_completes_nothing():
    job = going_back(nodes_that_stored=1).wait(0.5)
    job.lost(0)
    assert job.generation == 1
    stored(job, 1, step=56)
    assert decision(job) is None


def test_a_run_of_an_older_release_keeps_its_commands():
    job = scenario()
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    stored(stored(job, 0), 1)
    job.rank_killed(1).peer_failed(0)
    assert (job.generation, decision(job) is None) == (2, False)


def test_a_step_that_others_do_not_store_is_forgotten():
    job = scenario()
    stored(job, 0, step=5)
    stored(stored(job, 0, step=7), 1, step=7)
    commit = decision(job)
    assert commit is not None
    assert commit.checkpoint.step == 7


def test_another_node_commits_where_the_chosen_one_is_away():
    job = scenario()
    stored(stored(job, 0), 1)
    first = decision(job)
    assert first is not None
    job.transition(first.rank, NodeUnreachable)
    other = decision(job)
    assert other is not None
    assert (other.rank, other.checkpoint) == (1 - first.rank, first.checkpoint)


def test_a_problem_is_a_warning_until_one_is_durable():
    job = scenario()
    stored(job, 0, problem="file:///ckpt: No space left on device")
    [warning] = status(job).warnings
    assert "no checkpoint could be stored since" in warning
    assert "No space left on device" in warning
    assert job.state.phase == "RUNNING"
    stored(stored(job, 0), 1)
    committed(job, problem="away")
    assert "away" in status(job).warnings[0]
    committed(job)
    assert status(job).warnings == ()


def test_a_request_reaches_the_groups():
    job = scenario()
    assert desires_of(job.state)[0].checkpoint_request == 0
    job.take(CheckpointRequested())
    assert desires_of(job.state)[0].checkpoint_request == 1


def test_the_status_says_what_was_restored_from_where():
    job = scenario()
    restored(job, generation=1, step=41, source=RestoreSource.STORAGE)
    view = status(job).checkpoint
    assert (view.restored_step, view.restored_from, view.restored_generation) == (41, RestoreSource.STORAGE, 1)


def test_the_incident_says_which_step_was_restored_and_which_ones_are_distrusted():
    job = scenario().rank_killed(1)
    restored(job, generation=2, step=41, source=RestoreSource.PEER, again=1, distrusted=(42, 43))
    incident = job.state.incidents[-1]
    assert (incident.restored_step, incident.restored_from, incident.steps_again) == (41, RestoreSource.PEER, 1)
    assert incident.evidence[-1].text.startswith("step 42, 43 in memory was not loaded again")
    assert status(job).checkpoint.restored_again == 1
    told = explanation(incident, job="llama", flag="").plain
    assert "continued from step 41 in the memory of another node, with 1 step made again" in told


def test_a_job_without_a_storage_commits_nothing():
    job = Scenario("1").running()
    assert decision(stored(job, 0)) is None


@pytest.mark.parametrize(
    ("took", "hours", "restarts", "expected"),
    [
        (20, 10, 0, timedelta(minutes=20)),
        (20, 10, 3, timedelta(minutes=10)),
        (0.01, 10, 3, commits.SHORTEST_INTERVAL),
        (3000, 1000, 0, commits.LONGEST_INTERVAL),
        (300, 0.01, 9, timedelta(minutes=10)),
    ],
)
def test_auto_follows_young_and_daly(took: float, hours: float, restarts: int, expected: timedelta):
    job = scenario()
    now = job.state.started_at + timedelta(hours=hours)
    state = job.state.replace(restart_count=restarts)
    found = commits.interval(state, Checkpoint(storage="x"), timedelta(seconds=took), now)
    assert found == expected
    assert commits.interval(state, Checkpoint(storage="x", every=100), timedelta(seconds=took), now) is None


def test_a_job_whose_checkpoints_are_all_damaged_stops_with_each_of_them_named():
    job = scenario()
    damages = (
        "step-9-before-1: .metadata is missing",
        "step-7-before-1: __0_0.distcp has other bytes than were stored",
    )
    restored(job, generation=1, unusable=damages, stops=True)
    outcome = job.state.outcome
    assert outcome is not None
    assert (outcome.phase, outcome.exit_code) == (JobPhase.FAILED, 1)
    assert all(damage in outcome.reason for damage in damages)
    assert "checkpoint.on_unusable: start_over" in outcome.reason
    assert job.state.incidents[-1].actions == (Stop(reason=outcome.reason, exit_code=1),)
    text = explanation(job.state.incidents[-1], job="llama", flag="").plain
    assert all(damage in text for damage in damages)
    assert "NOT   start over: it would cost the whole training" in text


def test_a_job_that_starts_over_names_the_damaged_checkpoints_and_keeps_them():
    job = scenario()
    committed(stored(stored(job, 0), 1))
    restored(job, generation=1, step=9, source=RestoreSource.STORAGE, folder="step-9-before-1")
    job.rank_killed(1).peer_failed(0)
    damages = ("step-7-run-1: __0_0.distcp is missing", "step-9-before-1: .metadata is missing")
    restored(job, generation=2, unusable=damages)
    assert job.state.outcome is None
    text = explanation(job.state.incidents[-1], job="llama", flag="").plain
    assert all(damage in text for damage in damages)
    view = status(job).checkpoint
    assert (view.step, view.restored_step, view.restored_generation) == (None, None, 2)
    stored(stored(job, 0, step=1), 1, step=1)
    commit = decision(job)
    assert commit is not None
    assert (commit.kept_before, commit.inherited) == (2, ())


def test_a_world_that_is_over_stops_nothing():
    job = scenario()
    job.rank_killed(1).peer_failed(0)
    restored(job, generation=1, unusable=("step-9-before-1: torn",), stops=True)
    assert job.state.outcome is None


def test_a_commit_says_from_which_checkpoint_of_another_run_the_run_has_continued():
    job = scenario()

    for folder in ("step-30-before-1", "step-20-before-1", f"step-90-{job.state.uid}-1", "moments/step-5-before-1"):
        restored(job, generation=1, step=1, source=RestoreSource.STORAGE, folder=folder)
    stored(stored(job, 0), 1)
    commit = decision(job)
    assert commit is not None
    assert [one.folder for one in commit.inherited] == ["step-30-before-1", "moments/step-5-before-1"]


def committed_folders(job: Scenario) -> list[str]:
    """Carries out all that is to be committed, one after the other."""
    folders: list[str] = []
    while (commit := decision(job)) is not None:
        folders.append(commit.checkpoint.folder)
        committed(job)
    return folders


def test_checkpointers_that_store_at_the_same_time_are_each_committed():
    job = scenario()
    for place in ("model", "buffer"):
        stored(job, 0, place=place)
    for place in ("model", "buffer"):
        stored(job, 1, place=place)
    assert committed_folders(job) == ["model/step-7-run-1", "buffer/step-7-run-1"]


def test_a_commit_is_not_withdrawn_for_that_of_another_checkpointer():
    job = scenario()
    stored(stored(job, 0, place="model"), 1, place="model")
    stored(stored(job, 0, place="buffer"), 1, place="buffer")
    before = decision(job)
    assert before is not None
    assert before.checkpoint.place == "model"
    stored(stored(job, 0, step=9, place="model"), 1, step=9, place="model")
    assert committed_folders(job) == ["model/step-9-run-1", "buffer/step-7-run-1"]


def test_a_training_that_begins_with_small_steps_is_committed_though_one_before_it_was_not():
    job = scenario()
    stored(job, 0, step=100, place="fold-1")
    stored(stored(job, 0, step=5, place="fold-2"), 1, step=5, place="fold-2")
    assert committed_folders(job) == ["fold-2/step-5-run-1"]


def test_what_the_storage_has_lost_of_one_checkpointer_keeps_no_other_one_waiting():
    job = scenario()
    stored(stored(job, 0, place="model"), 1, place="model")
    stored(stored(job, 0, place="buffer"), 1, place="buffer")
    committed(job, problem="a part is lost")
    first = decision(job)
    assert first is not None
    assert first.checkpoint.place == "buffer"
    committed(job, problem="no answer")
    assert decision(job) == first, "where the storage takes none, none makes room for another"
    committed(job)
    assert committed_folders(job) == ["model/step-7-run-1"]


def test_a_job_remembers_what_is_stored_at_a_bounded_number_of_places():
    job = scenario()
    places = [f"fold-{number}" for number in range(40)]
    for place in places:
        stored(job, 0, place=place)
    assert list(job.state.checkpoints.parts_of) == places[-16:]
    for place in places:
        committed(stored(stored(job, 0, place=place), 1, place=place))
    assert list(job.state.checkpoints.stored) == list(job.state.checkpoints.answers_of) == places[-16:]


def test_parts_that_a_release_before_has_counted_still_count():
    job = stored(scenario(), 0, place="model")
    carried = job.state.checkpoints.model_dump(mode="json")
    carried["parts"] = carried.pop("parts_of")["model"]
    job.state = job.state.replace(checkpoints=CheckpointState.model_validate(carried))
    assert committed_folders(stored(job, 1, place="model")) == ["model/step-7-run-1"]
