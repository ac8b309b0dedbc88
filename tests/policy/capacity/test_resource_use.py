"""Tests of what nodes request and never use."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract import JobPhase, Peaks, Progress
from perdure.spec.quantities import bytes_of
from perdure.workflows.policy.capacity.resource_use import cores_for, memory_for, requests_of, unused
from perdure.workflows.policy.record.projections import status_of
from tests.policy.scenario import Scenario

GI = 2**30
HOUR = 3600.0
REQUESTS = {"cpu": "32", "memory": "64Gi"}


def peaks(memory: float = 21, cpu: float | None = 7.0, hours: float = 3.0) -> Peaks:
    return Peaks(watched=hours * HOUR, memory=int(memory * GI), cpu=cpu)


def test_what_was_never_used_is_told_with_what_would_do():
    cpu, memory = unused(REQUESTS, peaks(), nodes=8)
    assert (memory.requested, memory.used, memory.enough, memory.saved) == ("64Gi", "21Gi", "25Gi", "39Gi")
    assert (cpu.requested, cpu.used, cpu.enough, cpu.saved) == ("32", "7", "9", "23")
    assert (memory.nodes, memory.watched) == (8, timedelta(hours=3))


def test_nothing_is_said_before_an_hour_unless_the_training_is_over():
    early = peaks(hours=0.9)
    assert unused(REQUESTS, early, nodes=8) == ()
    assert len(unused(REQUESTS, early, nodes=8, complete=True)) == 2


def test_nothing_is_said_without_a_figure():
    assert unused(REQUESTS, None, nodes=8) == ()
    assert unused({}, peaks(), nodes=8) == ()
    assert unused(REQUESTS, Peaks(watched=9 * HOUR), nodes=8) == ()


def test_memory_that_was_raised_after_a_kill_is_needed():
    assert [one.resource for one in unused(REQUESTS, peaks(), nodes=8, raised=True)] == ["cpu"]


@pytest.mark.parametrize(
    ("requests", "memory", "cpu"),
    [
        ({"memory": "64Gi"}, 54, None),
        ({"memory": "2Gi"}, 1.5, None),
        ({"memory": "16Gi"}, 40, None),
        ({"cpu": "8"}, 1, 6.2),
        ({"cpu": "500m"}, 1, 0.1),
    ],
)
def test_a_small_difference_is_not_worth_telling(requests: dict[str, str], memory: float, cpu: float | None):
    assert unused(requests, peaks(memory, cpu), nodes=8) == ()


@pytest.mark.parametrize("memory", [1, 21 * GI, 2**46])
def test_what_would_do_has_room_above_the_peak(memory: int):
    assert memory_for(memory) >= memory * 1.15
    assert memory_for(memory) % GI == 0


def test_a_node_needs_a_processor():
    assert (cores_for(0.0), cores_for(0.5), cores_for(7.0)) == (1, 1, 9)


def job(**role: Any) -> Scenario:
    fields = {"nodes": "2", "command": ["torchrun", "train.py"], "image": "x", "resources": REQUESTS, **role}
    return Scenario(backend="kubernetes", roles={"worker": fields})


def status(found: Scenario, phase: JobPhase = JobPhase.RUNNING) -> Any:
    return status_of(found.state, found.job, groups=(), phase=phase, now=found.now)


def test_a_job_keeps_the_peaks_of_all_its_nodes_and_worlds():
    found = job().running()
    found.rank_killed(0, progress=Progress(step=5, generation=1, generation_steps=5, peaks=peaks(memory=21)))
    found.ready(0, 1, after=1).steps()
    found.rank_killed(1, progress=Progress(step=9, generation=2, generation_steps=9, peaks=peaks(memory=18, cpu=9.0)))
    assert found.state.peaks == peaks(memory=21, cpu=9.0)
    assert [one.resource for one in status(found).unused] == ["cpu", "memory"]


def test_progress_itself_is_kept_without_them():
    found = job().running()
    found.rank_killed(0, progress=Progress(step=5, generation=1, generation_steps=5, peaks=peaks()))
    assert found.state.progress is None or found.state.progress.peaks is None


def test_what_a_node_requests_after_a_kill_is_what_counts():
    found = job(scaling={"memory_max": "256Gi"}).running()
    found.rank_killed(0, out_of_memory=True, memory_limit=64 * GI)
    assert requests_of(found.state, found.job) == {"cpu": "32", "memory": "96Gi"}
    assert status(found).memory_raised


def test_a_machine_whose_requests_have_no_meaning_saves_nothing():
    found = Scenario(
        roles={"worker": {"nodes": "2", "command": ["torchrun", "train.py"], "resources": REQUESTS}}
    ).running()
    assert requests_of(found.state, found.job) == {}


def test_a_training_that_was_seen_whole_speaks_after_minutes():
    found = job().running()
    found.finish(0, progress=Progress(step=5, generation=1, generation_steps=5, peaks=peaks(hours=0.2)))
    assert [one.enough for one in status(found, JobPhase.SUCCEEDED).unused] == ["9", "25Gi"]
    assert status(found).unused == ()


def test_an_absurd_peak_of_a_hostile_node_saves_nothing_and_breaks_nothing():
    hostile = Peaks.model_validate({"watched": 1e300, "memory": 2**90, "cpu": 1e300})
    assert unused(REQUESTS, hostile, nodes=2) == ()
    assert memory_for(hostile.memory or 0) <= bytes_of("128Ti")
