"""Tests of the events that a job's decisions become."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from perdure.contract import DatasetParameters, SetAside, ShardsSetAside, UnprocessedSamples
from perdure.events import JobEvents
from perdure.workflows.event_sink import send_dataset, send_events, set_dataset_sink, set_sinks
from perdure.workflows.policy.facts.events import CancelRequested
from perdure.workflows.policy.record.job_events import JobEvent, events_between
from perdure.workflows.policy.services.datasets import DatasetState
from perdure.workflows.policy.state.job import JobState
from tests.policy.job_of_roles import Roles
from tests.policy.scenario import Scenario


def told(before: JobState, job: Scenario) -> list[tuple[str, str]]:
    return [(event.name, event.type) for event in events_between(before, job.whole, job.now)]


def test_a_killed_rank_is_an_incident_that_ends_when_all_step_again():
    job = Scenario("2").running()
    before = job.whole
    job.rank_killed(1)
    events = list(events_between(before, job.whole, job.now))
    [began] = [event for event in events if event.name == "incident"]
    assert (began.type, began.span, began.time) == ("begin", "0123abcd-1", job.incident.started_at)
    assert (began.attributes["number"], began.attributes["culprit"]) == (1, 1)
    repaired = job.whole
    job.ready(0, 1, after=1)
    job.steps(0, 1)
    ended = [event for event in events_between(repaired, job.whole, job.now) if event.name == "incident"]
    assert [(event.type, event.span, event.attributes["success"]) for event in ended] == [("end", "0123abcd-1", True)]
    everything = list(events_between(before, job.whole, job.now))
    assert [event.attributes["restarts"] for event in everything if event.name == "restart"] == [1]
    assert [event.attributes["world_generation"] for event in everything if event.name == "world"] == [2]


def test_the_events_of_a_role_name_it_and_spans_of_two_roles_have_names_of_their_own():
    job = Roles(trainer={}, ps={"ready": {"port": 6000}})
    begun = job.state
    job.runs("ps", "trainer")
    spans = {(event.span, event.role) for event in events_between(begun, job.state, job.now) if event.span}
    assert spans == {("0123abcd-trainer-rendezvous-1", "trainer"), ("0123abcd-ps-rendezvous-1", "ps")}
    before = job.state
    job.rank_killed("ps", 0).runs("ps")
    events = list(events_between(before, job.state, job.now))
    assert {event.role for event in events} == {"ps"}
    assert {"incident", "restart", "world"} <= {event.name for event in events}


def test_the_first_world_and_a_lost_node_are_told():
    job = Scenario("2")
    before = job.whole
    job.running()
    assert ("world", "instant") in told(before, job)
    before = job.whole
    job.lost(1)
    [relaunch] = [event for event in events_between(before, job.whole, job.now) if event.name == "relaunch"]
    assert relaunch.attributes == {"node": 1, "incarnation": 2}


def spans(before: JobState, job: Scenario) -> list[tuple[str, int, Any]]:
    """The ends of rendezvous, and the aborts: name, generation, and success or reason."""
    found = list(events_between(before, job.whole, job.now))
    return [
        (
            event.name,
            event.attributes["world_generation"],
            event.attributes.get("success", event.attributes.get("reason")),
        )
        for event in found
        if (event.name, event.type) in {("rendezvous", "end"), ("abort", "instant")}
    ]


def test_a_rendezvous_begins_with_the_decision_and_ends_when_all_nodes_run():
    job = Scenario("2")
    job.ready(0)
    before = job.whole
    job.ready(1)
    [began] = [event for event in events_between(before, job.whole, job.now) if event.name == "rendezvous"]
    assert (began.type, began.span, began.time) == ("begin", "0123abcd-worker-rendezvous-1", job.state.world_decided_at)
    assert began.attributes == {"world_generation": 1, "nodes": 2, "world_size": 2}
    before = job.whole
    job.wait(3).steps(0)
    assert spans(before, job) == []
    job.wait(4).steps(1)
    [end] = [event for event in events_between(before, job.whole, job.now) if event.name == "rendezvous"]
    assert (end.type, end.span, end.time) == ("end", "0123abcd-worker-rendezvous-1", job.now)
    assert (end.attributes["duration_s"], end.attributes["success"]) == (7.0, True)


def test_a_rendezvous_that_a_failure_ends_fails_and_its_world_is_aborted():
    job = Scenario("2").ready(0, 1)
    before = job.whole
    job.rank_killed(1)
    ends = [
        event for event in events_between(before, job.whole, job.now) if event.attributes.get("world_generation") == 1
    ]
    failed, abort = ends
    assert (failed.name, failed.type, failed.attributes["success"]) == ("rendezvous", "end", False)
    assert failed.attributes["error"] == job.incident.title
    assert abort.name == "abort"
    assert abort.attributes == {"world_generation": 1, "reason": job.incident.title, "incident": 1}
    later = job.whole
    job.ready(0, 1, after=1)
    assert spans(later, job) == []


def test_an_interrupted_world_is_aborted_once_and_a_finished_one_never():
    job = Scenario("2").running()
    before = job.whole
    job.rank_killed(1)
    broken = job.whole
    job.ready(0, 1, after=1).steps(0, 1)
    assert spans(before, job) == [("abort", 1, job.state.incidents[0].title), ("rendezvous", 2, True)]
    assert spans(broken, job) == [("rendezvous", 2, True)]
    before = job.whole
    job.finish(0, 1)
    job.command_ended(0, 1)
    assert spans(before, job) == []


def test_a_canceled_job_aborts_its_world():
    job = Scenario("2").running()
    before = job.whole
    job.take(CancelRequested(reason="enough"))
    [(name, generation, reason)] = spans(before, job)
    assert (name, generation) == ("abort", 1)
    assert "enough" in reason


def test_shards_that_are_set_aside_are_told_with_what_is_new():
    job = Scenario("2").running()
    shards = tuple(
        SetAside(epoch=0, first=10 * number, end=10 * number + 10, error="ValueError: bad") for number in (1, 2)
    )
    for count in (1, 2):
        before = job.whole
        aside = UnprocessedSamples(dataset="train", samples=10 * count, shards=shards[:count])
        job.take(ShardsSetAside(uid=job.state.uid, unprocessed=aside))
        job.take(ShardsSetAside(uid=job.state.uid, unprocessed=aside))
        [event] = [event for event in events_between(before, job.whole, job.now) if event.name == "shards_set_aside"]
        assert event.attributes == {"dataset": "train", "samples": 10 * count, "shards": [shards[count - 1].summary]}


def test_the_end_is_told_once_and_nothing_where_nothing_changed():
    job = Scenario("2").running()
    before = job.whole
    job.finish(0, 1)
    job.command_ended(0, 1)
    assert [name for name, _ in told(before, job)].count("outcome") == 1
    assert told(job.whole, job) == []


def test_each_event_has_a_method_in_the_vocabulary():
    source = inspect.getsource(inspect.getmodule(events_between))  # pyrefly: ignore[bad-argument-type]
    names = {name for name in vars(JobEvents) if not name.startswith("_")}
    assert {word for word in names if f'name="{word}"' in source} == names
    assert source.count("JobEvent(") == source.count('name="')


def test_a_sink_that_raises_loses_its_event_and_nothing_else(caplog: pytest.LogCaptureFixture):
    defective: list[tuple[str, str]] = []
    sound: list[tuple[str, str]] = []

    def fails_for_worlds(state: JobState, event: JobEvent) -> None:
        defective.append((state.name, event.name))
        if event.name == "world":
            raise RuntimeError("a defect")

    set_sinks(fails_for_worlds, lambda state, event: sound.append((state.name, event.name)))
    try:
        for name in ("first", "second"):
            job = Scenario("2")
            before = job.whole.replace(name=name)
            job.running()
            send_events(before, job.whole.replace(name=name), job.now)
            running = job.whole.replace(name=name)
            job.finish(0, 1)
            job.command_ended(0, 1)
            send_events(running, job.whole.replace(name=name), job.now)
    finally:
        set_sinks()
    assert defective == sound
    for name in ("first", "second"):
        assert (name, "world") in sound
        assert (name, "outcome") in sound, "after the event for which a sink failed"
        [line] = [record for record in caplog.records if record.getMessage().startswith(f"default/{name}: ")]
        assert "its event world is lost" in line.getMessage()
        assert line.exc_info is not None


def test_a_dataset_sink_that_raises_is_tried_again_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture):
    taken: list[str] = []

    def fails(job_id: str, name: str, state: DatasetState) -> None:
        taken.append(job_id)
        raise RuntimeError("a defect")

    set_dataset_sink(fails)
    try:
        for _ in range(3):
            for job_id in ("job/default/a", "job/default/b"):
                send_dataset(job_id, "train", DatasetState(parameters=DatasetParameters(size=10, shard_size=1)))
    finally:
        set_dataset_sink(None)
    assert taken == ["job/default/a", "job/default/b"] * 3
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["job/default/a", "job/default/b"]
