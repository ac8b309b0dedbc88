"""Tests of the events that a job's decisions become."""

from __future__ import annotations

import inspect

from perdure.events import JobEvents
from tests.policy.scenario import Scenario
from workflows.event_sink import send_events, set_sink
from workflows.policy.job_events import JobEvent, events_between
from workflows.policy.state import JobState


def told(before: JobState, job: Scenario) -> list[tuple[str, str]]:
    return [(event.name, event.type) for event in events_between(before, job.state)]


def test_a_killed_rank_is_an_incident_that_ends_when_all_step_again():
    job = Scenario("2").running()
    before = job.state
    job.rank_killed(1)
    events = list(events_between(before, job.state))
    [began] = [event for event in events if event.name == "incident"]
    assert (began.type, began.span, began.time) == ("begin", "0123abcd-1", job.incident.started_at)
    assert (began.attributes["number"], began.attributes["culprit"]) == (1, 1)
    repaired = job.state
    job.ready(0, 1, after=1)
    job.steps(0, 1)
    ended = [event for event in events_between(repaired, job.state) if event.name == "incident"]
    assert [(event.type, event.span, event.attributes["success"]) for event in ended] == [("end", "0123abcd-1", True)]
    everything = list(events_between(before, job.state))
    assert [event.attributes["restarts"] for event in everything if event.name == "restart"] == [1]
    assert [event.attributes["world_generation"] for event in everything if event.name == "world"] == [2]


def test_the_first_world_and_a_lost_node_are_told():
    job = Scenario("2")
    before = job.state
    job.running()
    assert ("world", "instant") in told(before, job)
    before = job.state
    job.lost(1)
    [relaunch] = [event for event in events_between(before, job.state) if event.name == "relaunch"]
    assert relaunch.attributes == {"node": 1, "incarnation": 2}


def test_the_end_is_told_once_and_nothing_where_nothing_changed():
    job = Scenario("2").running()
    before = job.state
    job.finish(0, 1)
    job.command_ended(0, 1)
    assert [name for name, _ in told(before, job)].count("outcome") == 1
    assert told(job.state, job) == []


def test_each_event_has_a_method_in_the_vocabulary():
    source = inspect.getsource(inspect.getmodule(events_between))  # pyright: ignore[reportArgumentType]
    names = {name for name in vars(JobEvents) if not name.startswith("_")}
    assert {word for word in names if f'name="{word}"' in source} == names
    assert source.count("JobEvent(") == source.count('name="')


def test_a_sink_that_raises_ends_the_events_and_not_the_job():
    job = Scenario("2")
    before = job.state
    job.running()
    seen: list[JobEvent] = []

    def sink(state: JobState, event: JobEvent) -> None:
        seen.append(event)
        raise RuntimeError("a defect")

    set_sink(sink)
    try:
        send_events(before, job.state)
        send_events(before, job.state)
    finally:
        set_sink(None)
    assert len(seen) == 1
