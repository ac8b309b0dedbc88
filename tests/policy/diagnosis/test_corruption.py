"""Ranks that do not compute what the others compute: whose node is replaced, where the job goes back to, and what is
no fault of a device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.cli.explain import explanation
from perdure.contract import CheckpointRef, CorruptionKind, FailureClass, LossCause, StoredCheckpoint
from perdure.contract.transitions import NodeCommittedCheckpoint, NodeStoredCheckpoint
from perdure.contract.worlds import UnsoundSteps
from perdure.workflows.policy.facts.events import RelaunchRequested
from perdure.workflows.policy.timers import next_deadline
from tests.policy.scenario import Scenario

CHECKPOINT = CheckpointRef(step=1000, run="run", generation=1)
PARAMETERS, GRADIENTS = CorruptionKind.PARAMETERS, CorruptionKind.GRADIENTS


def unsound(job: Scenario) -> UnsoundSteps | None:
    return job.state.checkpoints.unsound


def told(job: Scenario) -> str:
    return explanation(job.incident, job="llama", flag="").plain


def test_the_node_whose_rank_computes_wrongly_is_replaced_and_its_machine_avoided():
    job = Scenario("3").running()
    job.wrong_result(1, 1200, sound=1099, repeats=True, checksums=("those of rank 1 are a1 by rank 1, b2 by rank 2",))
    incident = job.incident
    assert (incident.failure, incident.culprit) == (FailureClass.CORRUPTION, 1)
    assert incident.rule == 'corruption/1 "a device computes wrongly: replace its node"'
    assert incident.title.startswith("node 1: rank 1")
    assert incident.title.endswith("(cpu) computed wrong gradients at step 1,200, also when it computed them again")
    assert job.incarnations[1] == 2
    assert [loss.cause for loss in job.state.losses] in ([], [LossCause.MACHINE])
    assert "those of rank 1 are a1 by rank 1, b2 by rank 2" in told(job)
    print(told(job))
    assert "its device would compute wrongly again" in told(job)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"suspects": (1,)}, "computed wrong gradients at step 7, and right when it computed them again"),
        ({"kind": PARAMETERS, "suspects": (1,)}, "has other parameters than the other ranks before step 7"),
    ],
)
def test_what_was_found_is_described(found: dict[str, Any], text: str):
    job = Scenario("3").running().wrong_result(1, 7, **found)
    assert text in job.incident.title


@pytest.mark.parametrize(
    ("stored", "sound", "after"), [(True, 1099, 1099), (False, 1099, 1199), (True, None, 1199), (False, 1199, 1199)]
)
def test_the_job_goes_back_to_a_sound_state_if_one_can_be_had(stored: bool, sound: int | None, after: int):
    job = Scenario("3", checkpoint={"storage": "file:///ckpt"}).running()
    if stored:
        for rank in range(3):
            parts = StoredCheckpoint(checkpoint=CHECKPOINT, size=100, took=timedelta(seconds=2))
            job.transition(rank, NodeStoredCheckpoint, generation=1, stored=parts)
        job.transition(0, NodeCommittedCheckpoint, generation=1, checkpoint=CHECKPOINT)
    job.wrong_result(1, 1200, sound=sound, repeats=True)
    assert unsound(job) == UnsoundSteps(generation=1, after=after, found_at=-1)
    assert f"load a state of step {after:,} or before" in job.incident.action


@pytest.mark.parametrize("kind", [GRADIENTS, PARAMETERS])
def test_no_node_is_blamed_where_one_of_two_ranks_is_wrong(kind: CorruptionKind):
    job = Scenario("2").running()
    job.wrong_result(0, 50, kind=kind, suspects=(0, 1), sound=39).wrong_result(
        1, 50, kind=kind, suspects=(0, 1), generation=1
    )
    incident = job.incident
    assert (incident.failure, incident.culprit) == (FailureClass.CORRUPTION, None)
    assert incident.rule == 'corruption/2 "one of two ranks computes wrongly: restart in place"'
    assert "rank 0 and rank 1" in incident.title
    assert (job.generation, job.incarnations) == (2, {0: 1, 1: 1})
    assert "NOT   replace a node: a third rank would have to say which of them is wrong" in told(job)


def test_a_step_that_is_not_deterministic_is_shown_once_and_interrupts_nothing():
    job = Scenario("2").running()
    kind, reason = CorruptionKind.NOT_DETERMINISTIC, "the step is not deterministic"
    job.wrong_result(0, 100, kind=kind, suspects=(), checksums=(reason,)).wait(60)
    assert (job.generation, job.state.interruption, job.state.restart_count) == (1, None, 0)
    [entry] = job.state.incidents
    assert entry.title == "step 100 cannot be replayed: no device is checked"
    assert reason in told(job)
    assert "torch.use_deterministic_algorithms(True)" in told(job)
    job.rank_killed(1).steps()
    job.wrong_result(0, 200, kind=kind, suspects=())
    assert len(job.state.incidents) == 2
    assert next_deadline(job.whole, job.job, job.now) is None


def test_a_rank_speaks_for_itself_only():
    job = Scenario("3").running()
    job.wrong_result(1, 100, global_rank=2)
    assert job.state.interruption is None
    job.wrong_result(1, 100, generation=7)
    assert (job.generation, job.incarnations) == (1, {0: 1, 1: 1, 2: 1})
    job.wrong_result(1, 100, suspects=(0,))
    assert job.incident.culprit is None, "a node cannot have another one replaced"


def test_a_wrong_result_explains_a_loss_that_is_no_number():
    job = Scenario("3", recovery={"on_nan": "rollback"}).running()
    job.bad_loss(1, 1201).wrong_result(1, 1200, sound=1199)
    assert job.incident.failure is FailureClass.CORRUPTION
    assert unsound(job) == UnsoundSteps(generation=1, after=1199, found_at=1201)


def test_a_rule_of_the_job_may_stop_it():
    rule = {"match": {"failures": ["CORRUPTION"]}, "action": "stop", "reason": "ask the vendor"}
    job = Scenario("3", retry={"rules": [rule]}).running().wrong_result(1, 100)
    assert job.state.outcome is not None
    assert "ask the vendor" in job.state.outcome.reason


def test_a_wrong_result_that_is_found_while_a_request_waits_is_no_less_acted_on():
    job = Scenario("3").running().take(RelaunchRequested(rank=2))
    job.wrong_result(1, 1200, repeats=True)
    assert (job.incident.failure, job.incident.culprit) == (FailureClass.CORRUPTION, 1)
    assert unsound(job) == UnsoundSteps(generation=1, after=1199, found_at=-1)
    assert job.incarnations[1] == 2
    job.those_that_leave_end().removed(1).ready(1, 2)
    assert job.incarnations == {0: 1, 1: 2, 2: 2}
    assert job.state.world is not None
    assert job.state.world.unsound == unsound(job)
