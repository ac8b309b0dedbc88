"""Tests of what `resources: auto` becomes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure.contract import AutoResources, JobPhase, JobShape, PastJob, Peaks, RoleUse
from perdure.spec.errors import SpecError
from perdure.spec.job import JobSpec
from perdure.spec.validate import parse_spec, to_mapping
from perdure.workflows.policy.capacity import past_use
from perdure.workflows.policy.state.job import JobState

GI = 2**30
NOW = datetime(2026, 11, 1, tzinfo=UTC)


def spec(
    *, nodes: int | str | dict[str, Any] = 2, resources: Any = "auto", labels: dict[str, str] | None = None, **role: Any
) -> JobSpec:
    fields = {"nodes": nodes, "image": "acme/llama:1", "command": ["torchrun", "train.py", "--lr", "1"], **role}
    roles = {"trainer": fields | {"resources": resources}}
    return parse_spec({"name": "job", "backend": "kubernetes", "labels": labels or {}, "roles": roles})


def past(name: str = "before", *, like: JobSpec | None = None, nodes: int = 4, **fields: Any) -> PastJob:
    known: dict[str, Any] = {"watched": 7200.0, "memory": 20 * GI, "cpu": 6.0, **fields}
    phase = known.pop("phase", JobPhase.SUCCEEDED)
    return PastJob(
        name=name,
        namespace="default",
        uid="1",
        shape=JobShape.of(like or spec()),
        phase=phase,
        started_at=NOW,
        finished_at=NOW + timedelta(hours=2),
        nodes=nodes,
        use=(RoleUse(role="trainer", nodes=nodes, peaks=Peaks.model_validate(known)),),
    )


def chosen(job: JobSpec, *jobs: PastJob, problem: str = "") -> AutoResources:
    [one] = past_use.choose_all(job, JobShape.of(job), jobs, problem=problem)
    return one


def test_it_is_what_jobs_like_it_have_used_and_some_more():
    found = chosen(spec(), past("a", memory=20 * GI), past("b", memory=24 * GI, cpu=7.0, shm=3 * GI))
    assert (found.cpu, found.memory, found.shm, found.measured) == ("9", "28Gi", "4Gi", 2)
    assert past_use.words(found) == (
        "9 processors and 28Gi of memory and 4Gi of /dev/shm for each node, from 2 jobs like it: a, b"
    )


def test_without_a_job_like_it_there_is_a_default_for_each_rank():
    one, eight = chosen(spec()), chosen(spec(resources={"auto": True, "gpu": 8}))
    assert (one.cpu, one.memory) == ("4", "16Gi")
    assert (eight.cpu, eight.memory) == ("32", "128Gi")
    assert past_use.words(one) == (
        "4 processors and 16Gi of memory for each node, by default: no job with its image and command was measured"
    )


def test_where_the_history_is_away_the_default_holds_and_says_why():
    found = chosen(spec(), problem="no worker that keeps a history answered")
    assert past_use.words(found).endswith("by default: no worker that keeps a history answered")


def test_what_the_specification_gives_stays():
    found = past_use.fill(
        spec(resources={"auto": True, "memory": "64Gi", "gpu": 8}),
        [chosen(spec(resources={"auto": True, "memory": "64Gi", "gpu": 8}), past())],
    ).roles["trainer"]
    assert (found.resources.memory, found.resources.gpu, found.resources.cpu) == ("64Gi", 8, "7")
    assert not found.resources.auto
    assert found.nodes.max == 2


@pytest.mark.parametrize(
    "other",
    [
        spec(image="acme/other:1"),
        spec(command=["torchrun", "eval.py", "--lr", "1"]),
        spec(command=["torchrun", "train.py", "--lr", "1", "--big"]),
    ],
)
def test_jobs_with_another_image_or_command_say_nothing(other: JobSpec):
    assert chosen(spec(), past(like=other, memory=900 * GI)).measured == 0


def test_values_of_options_do_not_make_another_command():
    assert chosen(spec(), past(like=spec(command=["torchrun", "train.py", "--lr", "9"]))).measured == 1


def test_jobs_with_the_same_labels_count_more():
    mine, theirs = {"size": "7b"}, {"size": "70b"}
    jobs = [past("large", like=spec(labels=theirs), memory=300 * GI), past("small", like=spec(labels=mine))]
    assert chosen(spec(labels=mine), *jobs).memory == "23Gi"
    assert chosen(spec(labels={"size": "13b"}), *jobs).measured == 2


def test_an_absurd_peak_does_not_count_beside_others():
    found = chosen(spec(), past("poisoned", memory=2**46, cpu=4_000.0), past("good"))
    assert (found.memory, found.cpu) == ("23Gi", "7")


def test_an_absurd_peak_alone_is_bounded():
    poisoned = past("poisoned", memory=2**46, cpu=4_000.0, shm=2**46)
    found = chosen(spec(), poisoned)
    assert (found.memory, found.cpu, found.shm) == ("4Ti", "512", "4Ti")
    bounded = chosen(spec(scaling={"memory_max": "64Gi"}), poisoned)
    assert bounded.memory == "64Gi"


def test_a_job_that_failed_early_says_nothing():
    assert chosen(spec(), past(phase=JobPhase.FAILED, watched=60.0)).measured == 0
    assert chosen(spec(), past(phase=JobPhase.FAILED, watched=7200.0)).measured == 1


def test_the_number_of_nodes_is_that_of_jobs_that_succeeded():
    job = spec(nodes="auto")
    found = chosen(job, past(nodes=4), past(nodes=8), past(nodes=8), past(nodes=1, phase=JobPhase.FAILED))
    assert found.nodes == 8
    assert past_use.words(found).startswith("8 nodes with 7 processors")
    filled = past_use.fill(job, [found])
    assert (filled.roles["trainer"].nodes.min, filled.roles["trainer"].nodes.max) == (8, 8)
    state = past_use.begin(JobState.begin(job, uid="1", now=NOW), filled, [found])
    assert (state.roles["trainer"].nodes_min, state.roles["trainer"].nodes_max) == (8, 8)
    assert state.roles["trainer"].auto == found


@pytest.mark.parametrize(
    ("had", "unit", "nodes"), [(3, 2, 4), (1, 4, 4), (2**31 - 1, 1, 2_000), (-5, 1, 1), (2**31, 3, 1_998)]
)
def test_the_number_of_nodes_is_one_that_can_form_a_world(had: int, unit: int, nodes: int):
    job = spec(nodes={"min": unit, "max": unit, "unit": unit, "auto": True})
    complete = past_use.fill(job, [chosen(job, past(nodes=had))])
    assert complete.roles["trainer"].nodes.max == nodes
    assert parse_spec(to_mapping(complete)) == complete
    assert past_use.fill(job, [chosen(job)]).roles["trainer"].nodes.max == unit


def test_without_such_a_job_there_is_one_node():
    job = spec(nodes="auto")
    assert past_use.fill(job, [chosen(job)]).roles["trainer"].nodes.max == 1


def test_a_complete_specification_is_one_that_every_release_reads():
    job = spec(nodes="auto", resources={"auto": True, "gpu": 1})
    complete = past_use.fill(job, [chosen(job, past())])
    assert parse_spec(to_mapping(complete)) == complete
    assert not past_use.is_auto(complete)


def test_a_number_of_nodes_alone_cannot_be_left_to_others():
    with pytest.raises(SpecError, match="nodes is auto, and resources is not"):
        spec(nodes="auto", resources={"cpu": 1})
