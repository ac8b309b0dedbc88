"""States that existed and cannot be loaded: what the ranks of the next world are told, waits, decisions, and losses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from perdure.cli.explain import explanation
from perdure.cli.text import incident_line
from perdure.contract import (
    CheckpointRef,
    IncidentView,
    JobPhase,
    KnownStates,
    Lookup,
    RestartRequest,
    Restore,
    RestoreSource,
    StorageFinding,
)
from perdure.contract.transitions import NodeCommittedCheckpoint, NodeRestoredCheckpoint
from perdure.workflows import requests
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.facts.events import RestartRequested, ResumeRequested, SuspendRequested
from perdure.workflows.policy.record.projections import next_action, status_of, warnings_of
from tests.policy.checkpoints.test_commits import STORAGE, committed, decision, stored
from tests.policy.scenario import UID, Scenario, reported

NOTHING = {"step": 0, "source": RestoreSource.NOTHING}
MISSING = (
    "file:///ckpt has no step-7-run-1, which this job has stored: it is not mounted on this node, or is another one"
)
NOT_MOUNTED = Lookup(stored=7, storage=StorageFinding.LACKS, problem=MISSING)


def trained(nodes: str = "2", **spec: Any) -> Scenario:
    """A job whose ranks have begun without a state, and whose step 7 is durable."""
    job = Scenario(nodes, **{"checkpoint": STORAGE, **spec}).running()
    found(job, **NOTHING, lookup=Lookup(storage=StorageFinding.EMPTY))
    for rank in range(job.state.nodes_max):
        stored(job, rank)
    return committed(job)


def found(job: Scenario, **facts: Any) -> Scenario:
    """The ranks of the present world report what they have found."""
    node = next(rank for rank, member in _world(job).members.items() if member.base_rank == 0)
    return job.transition(node, NodeRestoredCheckpoint, generation=job.generation, restored=Restore(**facts))


def _world(job: Scenario):
    assert job.state.world is not None
    return job.state.world


def known(job: Scenario) -> KnownStates:
    states = _world(job).known
    assert states is not None
    return states


def resumed(job: Scenario) -> Scenario:
    """The job is suspended without another checkpoint, and runs again."""
    job.take(SuspendRequested())
    job.wait(timedelta(minutes=2))
    job.those_that_leave_end()
    job.take(ResumeRequested())
    for rank in range(job.state.nodes_max):
        job.removed(rank)
    return job.running()


def told(job: Scenario) -> str:
    return explanation(job.state.incidents[-1], job="job", flag="").plain


def of(job: Scenario, kind: str) -> list[IncidentView]:
    return [one for one in job.state.incidents if one.observation is not None and getattr(one.observation, kind)]


def status(job: Scenario):
    return status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)


def test_a_world_is_told_of_the_newest_checkpoint_of_each_place():
    job = trained()
    for rank in range(2):
        stored(job, rank, step=9, place="ema")
    committed(job)
    job.rank_killed(1).peer_failed(0)
    assert {(one.checkpoint.folder, one.loads) for one in known(job).stored} == {
        ("step-7-run-1", True),
        ("ema/step-9-run-1", True),
    }
    assert (known(job).on_loss, known(job).may_return) == ("wait", False)


def test_what_another_run_has_stored_is_known_once_it_was_loaded():
    job = Scenario("1", checkpoint=STORAGE, recovery={"on_state_loss": "stop"}).running()
    assert known(job).stored == ()
    loaded = CheckpointRef.parse("step-40-before-3")
    found(job, step=40, source=RestoreSource.STORAGE, checkpoint=loaded, lookup=Lookup(in_storage=40))
    job.rank_killed(0)
    [one] = known(job).stored
    assert (one.checkpoint, known(job).on_loss) == (loaded, "stop")


def test_a_state_that_the_job_went_back_from_is_known_and_not_loaded():
    job = trained("2", recovery={"on_nan": "rollback"})
    own = CheckpointRef(step=7, run=UID, generation=1)
    job.state = job.state.replace(checkpoints=job.state.checkpoints.replace(stored={"": own}))
    job.bad_loss(0, 6, last_finite=4)
    job.wait(timedelta(seconds=30))
    job.ready(0, 1, after=1)
    assert [one.loads for one in known(job).stored] == [False]


def test_a_run_of_an_older_release_tells_its_worlds_nothing():
    job = Scenario("1", checkpoint=STORAGE)
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    assert _world(job.running()).known is None


def test_ranks_that_start_over_beside_damaged_checkpoints_wait_no_more():
    job = resumed(trained(checkpoint={**STORAGE, "on_unusable": "start_over"}))
    found(job, **NOTHING, lookup=NOT_MOUNTED, waits=True)
    assert of(job, "awaits_state")[0].closed_at is None
    found(job, step=0, source=RestoreSource.UNKNOWN, unusable=("step-7-run-1: torn",))
    assert of(job, "awaits_state")[0].closed_at is not None
    job.steps().wait(timedelta(hours=2))
    assert (job.state.phase, job.state.outcome) == (JobPhase.RUNNING, None)


def test_a_first_start_that_finds_nothing_is_no_loss():
    job = Scenario("1", checkpoint=STORAGE).running()
    found(job, **NOTHING, lookup=Lookup(storage=StorageFinding.EMPTY))
    assert job.state.incidents == ()
    assert status(job).checkpoint.restored_from is RestoreSource.NOTHING


def test_ranks_that_wait_for_a_storage_are_named_with_the_remedy_until_they_continue():
    job = resumed(trained())
    found(job, **NOTHING, lookup=NOT_MOUNTED, waits=True)
    [warning] = [one for one in warnings_of(job.state, job.job) if "stored" in one]
    assert MISSING in warning
    assert "`perdure restart job --older` continues now: they begin at the first step" in warning
    assert next_action(job.state, job.job) == warning
    [entry] = of(job, "awaits_state")
    assert entry.title == "the ranks wait for step 7"
    assert entry.closed_at is None
    assert MISSING in told(job)
    assert "mount the storage" in told(job)
    assert job.state.generation == 2, "nothing is restarted"
    job.wait(timedelta(minutes=30))
    found(
        job,
        step=7,
        source=RestoreSource.STORAGE,
        checkpoint=CheckpointRef.parse("step-7-run-1"),
        lookup=Lookup(stored=7),
    )
    [entry] = of(job, "awaits_state")
    assert entry.title == "the ranks waited for step 7 for 30m, and have loaded step 7"
    assert entry.closed_at == job.now
    assert warnings_of(job.state, job.job) == ()
    assert not of(job, "lost_state")


def test_a_storage_that_stays_away_stops_the_job_with_that_reason():
    job = resumed(trained("1", recovery={"state_timeout": "20m"}))
    found(job, **NOTHING, lookup=NOT_MOUNTED, waits=True)
    job.wait(timedelta(minutes=19))
    assert job.state.outcome is None
    job.wait(timedelta(minutes=2))
    outcome = job.state.outcome
    assert outcome is not None
    assert (outcome.phase, outcome.exit_code) == (JobPhase.FAILED, 3)
    assert MISSING in outcome.reason
    assert "recovery.state_timeout (20m) is over" in outcome.reason
    assert job.state.checkpoints.durable is not None


def test_ranks_that_stop_as_the_job_says_end_it():
    job = resumed(trained("1", recovery={"on_state_loss": "stop"}))
    found(job, **NOTHING, lookup=NOT_MOUNTED, stops=True)
    outcome = job.state.outcome
    assert outcome is not None
    assert outcome.reason.startswith(f"step 7 is stored: {MISSING}, and recovery.on_state_loss is stop")
    [incident] = [one for one in job.state.incidents if one.stopped]
    assert incident.rule.startswith("state/1")


def test_a_user_has_ranks_that_wait_continue_and_what_they_do_not_load_is_kept():
    job = resumed(trained("1"))
    with pytest.raises(ApplicationError, match="no ranks wait for a state"):
        requests.check_restart(job.whole, RestartRequest(older=True))
    found(job, **NOTHING, lookup=NOT_MOUNTED, waits=True)
    requests.check_restart(job.whole, RestartRequest(older=True))
    job.take(RestartRequested(older=True, reason="a new disk"))
    assert job.state.generation == 3
    assert known(job).stored == ()
    job.steps()
    assert "restart with an older state requested by a user: a new disk" in told(job)
    found(job, **NOTHING, again=7, lookup=Lookup(storage=StorageFinding.EMPTY))
    [entry] = of(job, "awaits_state")
    assert entry.title.endswith("in vain")
    [lost] = of(job, "lost_state")
    assert lost.title == "no saved state was loaded, although step 7 existed: 7 steps lost"
    stored(job, 0, step=3)
    commit = decision(job)
    assert commit is not None
    assert commit.kept_before == 3


def test_a_state_that_is_lost_is_an_incident_with_its_cost():
    job = resumed(trained("1", recovery={"on_state_loss": "older"}))
    assert known(job).on_loss == "older"
    found(job, step=4, source=RestoreSource.MEMORY, lookup=NOT_MOUNTED.replace(in_memory=4, seen_in_memory=4))
    [entry] = of(job, "lost_state")
    assert entry.title == "the training continued from step 4, although step 7 existed: 3 steps lost"
    text = told(job)
    assert "STEP  continued from step 4 in memory, with 3 steps made again" in text
    assert "the newest step in memory that all ranks can load is 4" in text
    assert MISSING in text
    assert "nothing was deleted" in incident_line(entry)
    stored(job, 0, step=5)
    commit = decision(job)
    assert commit is not None
    assert commit.kept_before == 2


def test_memory_that_is_gone_is_an_incident_where_there_is_no_storage():
    job = Scenario("1").running()
    found(job, **NOTHING, lookup=Lookup())
    job.rank_killed(0, progress=reported(120)).steps()
    found(job, **NOTHING, lookup=Lookup())
    [entry] = of(job, "lost_state")
    assert entry.title == "no saved state was loaded, although step 120 existed: 120 steps lost"
    assert "STEP  began without a saved state, with 120 steps made again" in told(job)


def elastic(**recovery: Any) -> Scenario:
    """A job of three nodes goes on with two, which do not have what the third had in memory."""
    job = Scenario("2:3", recovery=recovery).running()
    found(job, **NOTHING, lookup=Lookup())
    job.lost(2)
    assert job.generation == 2
    return job.steps()


PART = Lookup(complete=313, seen_in_memory=313)


def test_ranks_of_a_smaller_world_may_wait_for_the_node_that_is_being_replaced():
    job = elastic()
    assert known(job).may_return
    found(job, **NOTHING, lookup=PART, waits=True)
    assert "step 313 was in the memory of all nodes, and a node that has a part of it is not back" in next_action(
        job.state, job.job
    )
    job.removed(2).ready(2)
    job.wait(timedelta(seconds=30))
    assert job.generation == 3
    assert not known(job).may_return
    job.steps()
    found(job, step=313, source=RestoreSource.MEMORY, lookup=PART.replace(in_memory=313))
    assert of(job, "awaits_state")[0].title.endswith("and have loaded step 313")
    assert not of(job, "lost_state")


def test_they_continue_without_it_once_it_has_not_come_in_time():
    job = elastic(replace_timeout="5m")
    found(job, **NOTHING, lookup=PART, waits=True)
    job.wait(timedelta(minutes=4))
    assert job.generation == 2
    job.wait(timedelta(minutes=2))
    assert job.generation == 3
    assert not known(job).may_return
    assert job.state.incidents[-1].rule.startswith("state/2")
    job.steps()
    found(job, **NOTHING, again=313, lookup=PART)
    [entry] = of(job, "lost_state")
    assert "313 steps lost" in entry.title
    assert job.state.restart_count == 1, "only the loss of the node counts"


def test_a_failure_while_they_wait_does_not_end_the_wait():
    job = elastic(replace_timeout="5m")
    found(job, **NOTHING, lookup=PART, waits=True)
    job.wait(timedelta(minutes=3)).rank_killed(0).peer_failed(1)
    job.steps()
    assert job.generation == 3
    assert known(job).may_return
    found(job, **NOTHING, lookup=PART, waits=True)
    job.wait(timedelta(minutes=3))
    assert job.generation == 4, "its time counts from the first wait"


def test_another_checkpointer_that_finds_nothing_changes_nothing_of_the_first():
    job = trained("1")
    job.rank_killed(0)
    job.steps()
    found(job, step=7, source=RestoreSource.MEMORY, lookup=Lookup(stored=7, in_memory=7))
    found(job, **NOTHING, place="ema", lookup=Lookup())
    assert status(job).checkpoint.restored_step == 7
    assert not of(job, "lost_state")


def with_average(**spec: Any) -> Scenario:
    """A job whose script has a second checkpointer, of which a step is durable, too, and whose ranks start again."""
    job = trained(**spec)
    for rank in range(2):
        stored(job, rank, step=9, place="ema")
    committed(job)
    return resumed(job)


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ({"checkpoint": {**STORAGE, "on_unusable": "start_over"}}, {"unusable": ("ema/step-9-run-1: torn",)}),
        (
            {"recovery": {"on_state_loss": "older"}},
            {**NOTHING, "lookup": Lookup(stored=9, storage=StorageFinding.LACKS, problem="it is not there")},
        ),
    ],
    ids=["damaged", "missing"],
)
def test_a_checkpointer_that_begins_anew_leaves_the_states_of_others_known(spec: dict[str, Any], facts: dict[str, Any]):
    job = with_average(**spec)
    own = CheckpointRef(step=7, run="run", generation=1)
    found(job, step=7, source=RestoreSource.STORAGE, checkpoint=own, lookup=Lookup(stored=7, in_storage=7))
    found(job, **{"step": 0, "source": RestoreSource.UNKNOWN, **facts}, place="ema")
    view = status(job).checkpoint
    assert (view.restored_step, view.restored_from) == (7, RestoreSource.STORAGE)
    began = job.generation
    job.rank_killed(1).peer_failed(0)
    assert [one.checkpoint.folder for one in known(job).stored] == ["step-7-run-1"]
    job.steps()
    kept: dict[str, int] = {}
    for place in ("", "ema"):
        for rank in range(2):
            stored(job, rank, step=20, place=place)
        commit = decision(job)
        assert commit is not None
        kept[place] = commit.kept_before
        job.transition(commit.rank, NodeCommittedCheckpoint, generation=job.generation, checkpoint=commit.checkpoint)
    assert kept == {"": 0, "ema": began}


def test_the_checkpointer_of_a_run_of_an_older_release_that_starts_over_has_all_forgotten():
    job = Scenario("2", checkpoint={**STORAGE, "on_unusable": "start_over"})
    job.whole = job.whole.replace(behavior=Behavior.RELEASE_0_3)
    job.running()
    own = CheckpointRef(step=7, run="before", generation=1)
    found(job, step=7, source=RestoreSource.STORAGE, checkpoint=own)
    found(job, step=0, source=RestoreSource.UNKNOWN, unusable=("ema/step-9-run-1: torn",), place="ema")
    assert (job.state.checkpoints.inherited, status(job).checkpoint.restored_step) == ((), None)
