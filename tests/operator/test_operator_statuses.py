"""Tests of what objects and Events say of a job, on values only."""

from __future__ import annotations

from datetime import timedelta

import pytest

from perdure.contract import JobPhase, JobStatus, Progress
from perdure.operator import status as statuses
from perdure.operator.events import MOST_TEXTS, WINDOW, Occurrence, RecentTexts, occurrences
from perdure.operator.status import KnownStep, Observed, ResourceStatus, Truth
from tests.operator.known_jobs import CANCELLED, NOW, running_job, running_role


def test_a_status_shows_all_roles_and_counts_the_nodes_of_the_one_that_is_scaled():
    job = running_job(role="ps", by_role=(running_role("ps", 2), running_role("trainer", 4)))
    leading = job.model_copy(update={"role": "trainer", "nodes": 4, "nodes_max": 4})
    status = statuses.running_status(ResourceStatus(), job, None, Observed(1, NOW), leading=leading)
    assert [(role.name, role.phase, role.nodes) for role in status.roles] == [
        ("ps", "RUNNING", "2/2"),
        ("trainer", "RUNNING", "4/4"),
    ]
    assert (status.nodes, status.replicas) == ("4/4", 4)
    assert status.selector == "perdure.dev/uid=0a1b2c3d,perdure.dev/role=trainer"
    assert statuses.running_status(ResourceStatus(), running_job(), None, Observed(1, NOW)).roles == ()


def test_a_condition_keeps_its_time_while_it_is_the_same():
    def refused(status: ResourceStatus, message: str, minutes: int) -> ResourceStatus:
        now = NOW + timedelta(minutes=minutes)
        return statuses.refused_status(status, "InvalidSpec", message, Observed(minutes, now))

    twice = refused(refused(ResourceStatus(), "one", 1), "two", 2)
    (condition,) = twice.conditions
    assert (condition.message, condition.last_transition_time) == ("two", NOW + timedelta(minutes=1))
    assert (twice.phase, twice.accepts(2)) == ("REFUSED", False)
    right = statuses.accepted_status(twice, "", Observed(3, NOW + timedelta(minutes=3)))
    (condition,) = right.conditions
    assert (condition.status, condition.last_transition_time) == (Truth.TRUE, NOW + timedelta(minutes=3))
    assert (right.accepts(3), right.accepts(4)) == (True, False)


def test_the_step_is_the_newest_worlds_and_a_late_answer_does_not_take_it_back() -> None:
    job = running_job()
    status = ResourceStatus()
    shown: list[int | None] = []
    late_and_none = [None, KnownStep(40, generation=1), KnownStep(3, generation=1), None, KnownStep(41, generation=1)]
    newer_world = [KnownStep(7, generation=2), KnownStep(41, generation=1), None, KnownStep(8, generation=2)]
    for step in (*late_and_none, *newer_world):
        status = statuses.running_status(status, job, step, Observed(1, NOW))
        shown.append(status.step)
    assert shown == [None, 40, 40, 40, 41, 7, 7, 7, 8]
    for generation, expected in ((1, 8), (2, 41)):
        last = job.model_copy(update={"progress": Progress(step=41, generation=generation)})
        assert statuses.ended_status(status, CANCELLED, last, Observed(1, NOW)).step == expected


def test_nodes_that_are_refused_are_a_condition_and_an_event_for_as_long_as_they_are() -> None:
    def shown(status: ResourceStatus, job: JobStatus) -> ResourceStatus:
        return statuses.running_status(status, job, None, Observed(1, NOW))

    before = shown(ResourceStatus(), running_job())
    assert before.condition("NodesRefused") is None
    refused = shown(before, running_job(uncreated=(1, 3), refusal="no pods today"))
    condition = refused.condition("NodesRefused")
    assert condition is not None
    assert (condition.status, condition.message) == (
        statuses.Truth.TRUE,
        "node 1 and 1 more cannot be created: no pods today",
    )
    assert [one.reason for one in occurrences(before, refused)] == ["NodesRefused"]
    assert occurrences(refused, shown(refused, running_job(uncreated=(1,), refusal="no pods today"))) == ()
    over = shown(refused, running_job())
    condition = over.condition("NodesRefused")
    assert condition is not None
    assert condition.status is statuses.Truth.FALSE
    assert occurrences(refused, over) == ()


def test_a_stall_is_a_condition_and_an_event_until_ranks_step_again_or_the_job_ends() -> None:
    def shown(status: ResourceStatus, job: JobStatus) -> ResourceStatus:
        return statuses.running_status(status, job, None, Observed(1, NOW))

    before = shown(ResourceStatus(), running_job())
    assert before.condition("StepsStalled") is None
    stalled = shown(before, running_job(stalled=(1, 3)))
    [event] = occurrences(before, stalled)
    assert (event.reason, event.warning) == ("StepsStalled", True)
    assert event.message.startswith("the ranks of node 1 and 1 more make no step")
    assert occurrences(stalled, shown(stalled, running_job(stalled=(1,)))) == ()
    for over in (shown(stalled, running_job()), statuses.ended_status(stalled, CANCELLED, None, Observed(1, NOW))):
        condition = over.condition("StepsStalled")
        assert condition is not None
        assert (condition.status, condition.message) == (Truth.FALSE, "")


@pytest.mark.parametrize("phase", [JobPhase.WAITING, JobPhase.RECOVERING, JobPhase.HELD])
def test_a_phase_that_people_wait_through_is_one_event_with_the_jobs_words(phase: JobPhase) -> None:
    def shown(status: ResourceStatus, reason: str) -> ResourceStatus:
        return statuses.running_status(status, running_job(phase=phase, reason=reason), None, Observed(1, NOW))

    before = statuses.running_status(ResourceStatus(), running_job(), None, Observed(1, NOW))
    after = shown(before, "1 of 2 nodes is ready")
    assert occurrences(before, after) == (
        Occurrence(reason=phase.capitalize(), message="1 of 2 nodes is ready", warning=True),
    )
    assert occurrences(after, shown(after, "0 of 2 nodes are ready")) == ()


def test_of_texts_that_differ_only_some_are_events_of_their_own_for_a_while() -> None:
    recent = RecentTexts()

    def has_room(number: int, *, minutes: float = 0, uid: str = "1", reason: str = "Incident") -> bool:
        text = Occurrence(reason=reason, message=f"#{number} failed")
        return recent.has_room(uid, text, NOW + timedelta(minutes=minutes))

    assert all(has_room(number) for number in range(MOST_TEXTS))
    assert not has_room(MOST_TEXTS)
    assert has_room(0, minutes=1)
    assert has_room(MOST_TEXTS, uid="2")
    assert has_room(MOST_TEXTS, reason="Recovering")
    assert not has_room(MOST_TEXTS, minutes=9)
    assert has_room(MOST_TEXTS, minutes=WINDOW / timedelta(minutes=1))


def test_what_a_job_waits_for_is_in_its_condition_in_the_clusters_words() -> None:
    words = 'waits for node 0 (pending: a volume cannot be mounted (FailedMount: configmap "data" not found))'
    job = running_job(phase=JobPhase.STARTING, reason="0 of 2 nodes are ready", next_action=words)
    condition = statuses.running_status(ResourceStatus(), job, None, Observed(1, NOW)).condition("Running")
    assert condition is not None
    assert (condition.status, condition.message) == (Truth.FALSE, f"0 of 2 nodes are ready; {words}")


def test_what_is_left_of_nodes_is_in_the_condition_of_a_job_that_has_ended() -> None:
    left = "node 1: pod llama-1 is left to the cluster: its machine gpu-7 does not answer"
    status = statuses.ended_status(ResourceStatus(), CANCELLED, running_job(left=(left,)), Observed(1, NOW))
    condition = status.condition("Running")
    assert condition is not None
    assert (condition.status, condition.reason, condition.message) == (Truth.FALSE, "Cancelled", left)
