"""Tests of values from a newer release: each is read as UNKNOWN, and every decision handles that."""

from __future__ import annotations

import inspect
import json
import typing
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel

import perdure.contract as messages
from perdure.cli import text
from perdure.client.views import overall_progress
from perdure.contract import (
    Failure,
    FailureClass,
    FailureKind,
    GroupTransitions,
    JobPhase,
    LossCause,
    NodePhase,
    NodeView,
    Progress,
    ProgressSource,
)
from perdure.contract.base import Vocabulary
from perdure.contract.transitions import KINDS, AnyTransition, NodeChangedOtherwise, NodeLost
from perdure.operator.status import Observed, ResourceStatus
from perdure.operator.status import running_status as resource_of
from perdure.workflows.policy.record.action_words import words
from perdure.workflows.policy.record.page import details_of
from perdure.workflows.policy.record.projections import status_of
from perdure.workflows.policy.repair.case import Case
from perdure.workflows.policy.repair.ladder import decide
from perdure.workflows.policy.state.node import NodeFailure
from perdure.workflows.policy.state.role import Interruption
from tests.policy.scenario import FACTS, START, Scenario

WORD = "A_WORD_OF_THE_NEXT_RELEASE"


def models() -> list[type[BaseModel]]:
    found = [value for _, value in inspect.getmembers(messages, inspect.isclass) if issubclass(value, BaseModel)]
    assert len(found) > 40
    return found


def enumerations(annotation: Any) -> set[type[Enum]]:
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return {annotation}
    return {found for argument in typing.get_args(annotation) for found in enumerations(argument)}


def all_words() -> set[type[Enum]]:
    """The enumerations that messages hold, specifications aside."""
    fields = [field.annotation for model in models() for field in model.model_fields.values()]
    found = {kind for annotation in fields for kind in enumerations(annotation)}
    return {kind for kind in found if not kind.__module__.startswith("perdure.spec.")}


def test_every_set_of_words_in_messages_takes_one_that_it_does_not_know():
    for kind in all_words():
        assert issubclass(kind, Vocabulary), kind
        assert kind(WORD) is kind("UNKNOWN"), kind


def test_words_are_texts():
    with pytest.raises(ValueError, match="7 is not a valid"):
        FailureKind(7)


def test_a_report_with_unknown_words_is_read():
    plain = Scenario("2").running().failure(1).model_dump(mode="json")
    read = Failure.model_validate_json(json.dumps(plain | {"kind": WORD, "progress": {"step": 7, "source": WORD}}))
    assert read.kind is FailureKind.UNKNOWN
    assert read.progress == Progress(step=7, source=ProgressSource.UNKNOWN)
    assert read.sender == Failure.model_validate(plain).sender


@pytest.mark.parametrize("kind", FailureKind)
def test_a_report_of_any_kind_leads_to_a_world_or_an_end(kind: FailureKind):
    job = Scenario("2").running()
    job.take(job.failure(1, kind=kind))
    if job.state.outcome is not None:
        return
    job.wait(timedelta(minutes=1))
    for rank, node in job.state.nodes.items():
        if node.phase is not NodePhase.READY:
            job.ready(rank, after=1)
    assert job.generation == 2
    assert len(job.state.incidents) == 1


def test_an_unknown_report_of_a_node_that_is_in_no_world_replaces_nothing():
    job = Scenario("2").ready(0)
    job.take(job.failure(0, kind=FailureKind.UNKNOWN))
    assert job.node(0).alive


@pytest.mark.parametrize("failure", FailureClass)
def test_every_failure_has_a_verdict(failure: FailureClass):
    job = Scenario("2").running()
    reported = NodeFailure(rank=1, failure=failure, time=job.now, text="it failed")
    others = tuple(NodeFailure(rank=0, failure=other, time=job.now, text="too") for other in FailureClass)
    for failures in ((reported,), (reported, *others)):
        interruption = Interruption(since=job.now - timedelta(minutes=1), failures=failures)
        verdict = decide(Case(job.state, interruption, job.job, job.now))
        assert words(verdict.actions)


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_edge_is_taken(kind: type[AnyTransition]):
    job = Scenario("2").running()
    for cause in LossCause:
        job.transition(1, kind, cause=cause, generation=1, **FACTS)
        job.wait(timedelta(seconds=10))
        job.ready(*(rank for rank, node in job.state.nodes.items() if node.phase is not NodePhase.READY))
    assert status_of(job.state, job.job, groups=(), phase=job.state.phase, now=job.now)


def test_a_change_of_an_unknown_kind_is_read_beside_the_others():
    known = {"rank": 1, "incarnation": 1, "time": START.isoformat(), "generation": 4}
    read = GroupTransitions.model_validate(
        {"uid": "0", "group": 0, "sequence": 1, "transitions": [known | {"kind": WORD}, known | {"kind": "LOST"}]}
    )
    assert [type(transition) for transition in read.transitions] == [NodeChangedOtherwise, NodeLost]
    assert {transition.generation for transition in read.transitions} == {4}
    assert GroupTransitions.model_validate_json(read.model_dump_json()) == read


@pytest.mark.parametrize("phase", JobPhase)
def test_every_phase_is_shown(phase: JobPhase):
    job = Scenario("2").running()
    status = status_of(job.state, job.job, groups=(), phase=phase, now=job.now)
    assert phase in text.phase(phase)
    assert text.nodes(status)
    assert details_of(job.whole, job.job, phase, job.now)
    assert resource_of(ResourceStatus(), status, None, Observed(1, START)).phase == phase


@pytest.mark.parametrize("phase", NodePhase)
def test_every_node_is_shown_and_every_progress_counts(phase: NodePhase):
    views = [
        NodeView(
            rank=0, incarnation=1, phase=phase, since=START, group_rank=0, progress=Progress(step=3, source=source)
        )
        for source in ProgressSource
    ]
    assert all(text.node_state(view)[2] for view in views)
    assert overall_progress(views, None)
