"""A stored checkpoint after whose restore the job fails again is not loaded again; a storage that fails is told."""

from __future__ import annotations

import pytest

from perdure.contract import CheckpointRef, FailureClass, Progress, RestoreSource, RollBack, StoredCheckpoint
from perdure.contract.transitions import NodeStoredCheckpoint
from perdure.workflows.policy.checkpoints import state_loss, trust
from perdure.workflows.policy.checkpoints.trust import judge
from perdure.workflows.policy.facts.events import RestartRequested
from perdure.workflows.policy.world.group_desire import desires_of
from tests.policy.checkpoints.test_commits import committed, decision, restored, scenario, status, stored
from tests.policy.scenario import UID, Scenario, counted, reported

FOLDER = "step-100-run-1"


def loaded(job: Scenario, step: int = 100, *, source: RestoreSource = RestoreSource.STORAGE) -> Scenario:
    """The ranks of the present world continue from there."""
    folder = f"step-{step}-run-1" if source is RestoreSource.STORAGE else ""
    return restored(job, generation=job.generation, step=step, source=source, folder=folder)


def failed(job: Scenario, progress: Progress) -> Scenario:
    return job.rank_raised(1, progress=progress).steps()


def distrusted(job: Scenario) -> tuple[str, ...]:
    world = desires_of(job.state)[0].world
    return tuple(one.folder for one in world.distrusted_checkpoints) if world is not None else ()


def test_a_checkpoint_is_distrusted_when_the_job_does_not_come_further_than_before():
    job = failed(scenario(), reported(105))
    assert distrusted(loaded(job)) == ()
    failed(job, reported(103))
    assert distrusted(job) == (FOLDER,)
    texts = [one.text for one in job.incident.evidence]
    assert any("the checkpoint of step 100 in storage is not loaded again" in text for text in texts)
    loaded(job, 80)
    failed(job, reported(105))
    assert distrusted(job) == (FOLDER, "step-80-run-1")


def test_it_stays_trusted_where_the_job_came_further():
    job = failed(scenario(), reported(105))
    failed(loaded(job), reported(106))
    assert distrusted(job) == ()


def test_snapshots_in_memory_between_do_not_hide_it():
    job = failed(scenario(), reported(105))
    loaded(loaded(job), 104, source=RestoreSource.MEMORY)
    failed(job, reported(104))
    assert distrusted(job) == (FOLDER,)


def test_a_loss_that_is_no_number_is_enough():
    job = loaded(scenario())
    failed(job, reported(110).model_copy(update={"diverged": True}))
    assert distrusted(job) == (FOLDER,)


def test_counted_steps_are_compared_with_those_after_the_same_checkpoint():
    job = failed(scenario(), counted(400))
    failed(loaded(job), counted(5))
    assert distrusted(job) == ()
    failed(loaded(job), counted(7))
    assert distrusted(job) == ()
    failed(loaded(job), counted(7))
    assert distrusted(job) == (FOLDER,)


@pytest.mark.parametrize("how", ["lost", "killed by the machine"])
def test_the_loss_of_a_machine_says_nothing_about_a_state(how: str):
    job = failed(scenario(), reported(105))
    loaded(job)
    if how == "lost":
        job.lost(1).removed(1).ready(1).steps()
    else:
        job.ended_from_outside(1, progress=reported(101)).lost(1)
    assert distrusted(job) == ()


def test_ranks_learn_which_worlds_the_script_has_ended():
    job = scenario()

    def told() -> tuple[int, ...] | None:
        return job.state.world.script_failures if job.state.world is not None else None

    assert told() == ()
    job.take(RestartRequested()).steps()
    job.rank_killed(0).steps()
    assert (job.generation, told()) == (3, ())
    failed(job, reported(105))
    assert (job.generation, told()) == (4, (3,))
    failed(job, reported(205))
    assert told() == (3, 4)


def test_a_bounded_number_of_the_worlds_that_the_script_has_ended_is_remembered():
    job = scenario()
    for step in range(20):
        job.state = judge(job.state.replace(generation=step), FailureClass.USER_CODE, job.now)
    assert job.state.checkpoints.script_failures == tuple(range(4, 20))


def test_a_storage_that_fails_is_an_entry_with_its_time_and_the_newest_checkpoint():
    job = scenario()
    stored(stored(job, 0), 1)
    committed(job)
    job.wait(60)
    for _ in range(3):
        stored(job, 0, step=9, problem="s3://ckpt: away")
        job.wait(20)
    [entry] = job.state.incidents
    assert (entry.title, entry.over_at is None) == ("no checkpoint can be stored; training continued", False)
    assert [one.text for one in entry.evidence] == [
        "s3://ckpt: away",
        "the newest durable checkpoint of this run was that of step 7, of 00:00:00 UTC",
    ]
    assert job.state.open_incident is None
    stored(stored(job, 0, step=9), 1, step=9)
    committed(job)
    [entry] = job.state.incidents
    assert entry.title == "no checkpoint could be stored for 1m; training continued"
    assert status(job).warnings == ()
    stored(job, 0, step=11, problem="s3://ckpt: away")
    assert len(job.state.incidents) == 2


def stored_by_epochs(job: Scenario, epoch: int, *, rank: int = 0) -> Scenario:
    """A checkpoint of an epoch, at each of which 100 losses were reported; one rank alone reports them."""
    for each in (0, 1):
        checkpoint = CheckpointRef(step=epoch, run=UID, generation=job.generation)
        parts = StoredCheckpoint(checkpoint=checkpoint, reported=100 * epoch if each == rank else None)
        job.transition(each, NodeStoredCheckpoint, generation=job.generation, stored=parts)
    return job


def goes_back(job: Scenario, after: int) -> Scenario:
    job.whole = job.whole.with_view(trust.distrust_unsound(job.state, RollBack(after=after, found_at=after + 2)))
    return job


@pytest.mark.parametrize("rank", [0, 1])
def test_checkpoints_of_a_script_that_saves_by_epochs_are_judged_by_the_steps_of_its_losses(rank: int):
    job = scenario()
    for epoch in (3, 4):
        committed(stored_by_epochs(job, epoch, rank=rank))
    known = job.state.checkpoints.durable
    assert known is not None
    assert known.checkpoint.step == 4
    goes_back(job, 348)
    assert job.state.checkpoints.distrusted == (known.checkpoint,)
    assert not trust.is_unsound(job.state, CheckpointRef(step=3, run=UID, generation=1))
    states = state_loss.known_states(job.state, job.job, (0, 1))
    assert states is not None
    assert [one.loads for one in states.stored] == [False]
    # What is reported late is not committed.
    goes_back(job, 248)
    stored_by_epochs(job, 3, rank=rank)
    assert decision(job) is None


def test_a_checkpoint_that_is_being_stored_is_not_committed_where_its_losses_were_no_numbers():
    job = stored_by_epochs(scenario(), 4)
    assert decision(job) is not None
    assert decision(goes_back(job, 348)) is None


def test_progress_is_compared_with_the_losses_from_which_a_world_continues():
    job = scenario()
    committed(stored_by_epochs(job, 2))
    for losses in (300, None):
        job.rank_raised(1, progress=reported(350)).steps()
        source = RestoreSource.MEMORY if losses else RestoreSource.STORAGE
        folder = "" if losses else CheckpointRef(step=2, run=UID, generation=1).folder
        step = 3 if losses else 2
        restored(job, generation=job.generation, step=step, source=source, folder=folder, reported=losses)
        assert job.state.memory.continued_from == (losses or 200)
