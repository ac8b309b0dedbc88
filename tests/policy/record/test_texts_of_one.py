"""Texts of jobs with one of everything, and of jobs whose durations are told: as people write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from perdure.cli.explain import explanation
from perdure.client.changes import Changes
from perdure.contract import JobPhase
from perdure.workflows.policy.record.projections import status_of
from tests.policy.capacity.test_scaling import ScaledJob
from tests.policy.capacity.test_throughput import shared
from tests.policy.scenario import Scenario, reported

_PLURAL_OF_ONE = re.compile(
    r"(?<![\d.,:/-])(?<!node )(?<!rank )(?<!generation )"
    r"1 (nodes|ranks|restarts|steps|times|jobs|torchruns|machines|incidents|samples|generations)\b"
)
_PYTHON_S_DURATION = re.compile(r"\b\d+:\d\d:\d\d\b(?!\.\d| UTC)")


def texts(job: Scenario) -> Iterator[str]:
    """What people read of a job now, but for times of day."""
    status = status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)
    yield from (status.reason, status.next_action, *status.warnings)
    if status.scaling is not None:
        yield from (status.scaling.why, status.scaling.problem)
    for incident in job.state.incidents:
        yield from (incident.title, incident.action, *(one.why_not for one in incident.considered))
        story = explanation(incident, job="job", flag="", ended=None, several_roles=False).plain
        yield re.sub(r"(?m)^ *\S+ +\d\d:\d\d:\d\d(\.\d)?|\d\d:\d\d:\d\d(\.\d)?", "", story)
    if job.state.outcome is not None:
        yield job.state.outcome.reason


def spent() -> Scenario:
    job = Scenario("1", retry={"max_restarts": 1}).running()
    for _ in range(2):
        job.wait(5)
        job.rank_killed(0, progress=reported(1)).steps()
    assert job.state.phase is JobPhase.STOPPING
    return job


def lost() -> Scenario:
    job = Scenario("2").running()
    job.wait(60)
    return job.lost(1)


def finished() -> Scenario:
    return Scenario("1").running().finish()


def scaled_down() -> Scenario:
    job = ScaledJob("1:16", law=shared(0.1, 4.0), total=8000).settle()
    assert job.sizes[-1] == 1
    return job


JOBS: dict[str, Callable[[], Scenario]] = {
    "new": lambda: Scenario("1"),
    "running": lambda: Scenario("1").running(),
    "a budget that is spent": spent,
    "a lost node": lost,
    "finished": finished,
    "one node is enough": scaled_down,
    "of a deadline": lambda: ScaledJob(
        "1:16",
        law=shared(8, 0.5),
        total=80,
        policy="deadline",
        finish_by=ScaledJob(law=shared(8, 0.5)).now + timedelta(hours=10),
    ).settle(),
}


@pytest.mark.parametrize("job", JOBS)
def test_one_thing_is_told_in_the_singular_and_durations_with_units(job: str) -> None:
    told = [text for text in texts(JOBS[job]()) if text]
    assert told
    assert [text for text in told if _PLURAL_OF_ONE.search(text) or _PYTHON_S_DURATION.search(text)] == []


def test_a_change_to_one_node_is_told_so() -> None:
    assert Changes(name="llama").scale("1").plan == "scale to 1 node"
    assert Changes(name="llama").scale("1:2").plan == "scale to 1:2 nodes"
