"""Tests that claims of incidents without support by the injected faults are found, and true ones are accepted."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import psutil
import pytest

from benchmarks.chaos.faults import Fault, Kind, inject
from benchmarks.chaos.judgement import doubts, never_hit
from perdure.contract import Evidence, EvidenceSource, FailureClass, IncidentView

KILLED_AT = datetime(2026, 1, 1, tzinfo=UTC)


def fault(kind: Kind = Kind.RANK, *, node: int = 1, after: float = 0.0) -> Fault:
    time = KILLED_AT.timestamp() + after
    return Fault(kind=kind, job="job", nodes=(node,), time=time, processes=1, phase="RUNNING")


def incident(failure: FailureClass | None = FailureClass.KILLED, *, culprit: int = 1, node: int = 1) -> IncidentView:
    seen = KILLED_AT + timedelta(seconds=0.1)
    return IncidentView(
        number=1,
        title="node 1: rank 1 SIGKILL",
        failure=failure,
        culprit=culprit,
        started_at=seen,
        noticed_at=seen,
        decided_at=seen,
        evidence=(Evidence(time=seen, source=EvidenceSource.AGENT, rank=node, text="rank 1 SIGKILL"),),
    )


def test_a_true_story_is_not_doubted():
    assert doubts("job", [incident()], [fault()]) == []


@pytest.mark.parametrize(
    ("told", "injected", "doubt"),
    [
        ([incident(culprit=0)], [fault()], "culprit node 0"),
        ([incident(FailureClass.NODE_LOST)], [fault()], "NODE_LOST after rank of node 1"),
        ([incident(FailureClass.USER_CODE)], [fault()], "USER_CODE, which was not injected"),
        ([incident()], [fault(after=-60)], "nothing was injected before it"),
        ([incident(node=0)], [fault()], "no incident shows it"),
        ([], [fault()], "no incident shows it"),
    ],
)
def test_a_false_one_is(told: list[IncidentView], injected: list[Fault], doubt: str):
    assert any(doubt in found for found in doubts("job", told, injected))


def test_a_fault_that_hit_no_process_or_a_job_that_did_not_train_needs_no_story():
    assert doubts("job", [], [fault().model_copy(update={"processes": 0})]) == []
    assert doubts("job", [], [fault().model_copy(update={"phase": "RECOVERING"})]) == []


def test_kinds_that_never_hit_a_process_are_named():
    missed = [fault(Kind.AGENT).model_copy(update={"processes": 0})] * 3
    assert never_hit([*missed, fault(Kind.RANK)]) == [Kind.AGENT]
    assert never_hit([*missed, fault(Kind.AGENT)]) == []


def test_a_node_without_a_process_of_the_kind_was_not_hit():
    """The third node of an elastic world may have no rank yet, and no incident can show the end of one."""
    with psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        _, hit = inject(Kind.RANKS_OF_TWO_NODES, {1: [process], 2: []})
    assert hit == {1: [process]}
