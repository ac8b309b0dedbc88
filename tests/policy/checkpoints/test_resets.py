"""A job that was reset loads no state that it had gone back from, and deletes none of which it does not know enough."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from perdure.contract import CheckpointRef, KnownStates, KnownStored, NodePhase, NodeView, UnsoundSteps, World
from perdure.workflows.policy.behavior import Behavior
from perdure.workflows.policy.facts.events import GroupAdopted
from tests.policy.checkpoints.test_commits import STORAGE, decision, stored
from tests.policy.scenario import Scenario

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FAILING = CheckpointRef(step=40, run="run", generation=2)
NEWEST = CheckpointRef(step=60, run="run", generation=3)
UNSOUND = UnsoundSteps(generation=3, after=50, found_at=61)
WORLD = World(
    generation=4,
    members={},
    nodes=2,
    processes=2,
    store_address="10.0.0.1",
    store_port=29500,
    store_rank=0,
    distrusted_checkpoints=(FAILING,),
    unsound=UNSOUND,
    script_failures=(2,),
    known=KnownStates(stored=(KnownStored(checkpoint=NEWEST, loads=False),)),
)


def adopt(job: Scenario, *, generation: int = 4) -> Scenario:
    """The group's table reaches a job that was reset."""
    views = tuple(
        NodeView(
            rank=rank,
            incarnation=1,
            phase=NodePhase.READY,
            since=NOW,
            token="theirs",
            generation=generation,
            address=f"10.0.0.{rank + 1}",
            store_ports=(29501,),
        )
        for rank in range(2)
    )
    return job.take(GroupAdopted(group=0, nodes=views, world=WORLD.replace(generation=generation)))


def test_a_job_that_is_reset_keeps_its_next_world_from_the_states_that_it_had_gone_back_from():
    job = adopt(Scenario("2", checkpoint=STORAGE))
    world = job.state.world
    assert world is not None
    assert (world.generation, world.unsound, world.script_failures) == (5, UNSOUND, (2,))
    assert world.distrusted_checkpoints == (FAILING,)
    assert world.known is not None
    assert [one.checkpoint for one in world.known.stored] == [NEWEST]


def test_a_job_that_is_reset_deletes_no_checkpoint_of_worlds_that_it_has_forgotten():
    job = adopt(Scenario("2", checkpoint=STORAGE)).steps()
    stored(stored(job, 0, step=90), 1, step=90)
    commit = decision(job)
    assert commit is not None
    assert commit.kept_before == 5


def test_a_job_that_has_forgotten_no_world_deletes_as_before():
    job = adopt(Scenario("2", checkpoint=STORAGE).running(), generation=1)
    stored(stored(job, 0), 1)
    commit = decision(job)
    assert commit is not None
    assert commit.kept_before == 0


def test_what_a_job_has_given_up_stays_given_up_where_a_group_alone_was_reset():
    job = adopt(Scenario("2", checkpoint=STORAGE)).steps()
    known = job.state.checkpoints.replace(stored={}, unsound=None)
    job.whole = job.whole.with_role(job.whole.roles["worker"].replace(checkpoints=known))
    adopt(job)
    assert (job.generation, job.state.checkpoints) == (5, known)


def test_a_suspended_job_that_is_reset_gives_its_worlds_generations_of_their_own():
    job = Scenario("2", checkpoint=STORAGE).take(GroupAdopted(group=0, nodes=(), world=WORLD)).running()
    world = job.state.world
    assert world is not None
    assert (world.generation, world.unsound) == (5, UNSOUND)


@pytest.mark.parametrize("behavior", [Behavior.RELEASE_0_3])
def test_a_run_of_an_earlier_release_decides_as_before(behavior: Behavior):
    job = Scenario("2", checkpoint=STORAGE)
    job.whole = job.whole.replace(behavior=behavior)
    adopt(job)
    assert job.state.world is not None
    assert job.state.world.unsound is None
