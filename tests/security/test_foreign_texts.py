"""Tests that reading what any author of an object may write takes a time that is bounded: the operator, and a worker,
serve nobody else meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from perdure.client.scale_plans import KnownRole, requests_of
from perdure.operator.resource import TrainingJobResource
from perdure.spec.accepted import read_accepted
from perdure.spec.base import fill_template
from perdure.spec.errors import MOST_PROBLEMS, SpecError
from perdure.spec.importers.scaleplan import read_scale_plan
from perdure.spec.load import SpecDocument
from perdure.spec.validate import validate_spec
from tests.support.processor_time import ends_within

ROLE: dict[str, Any] = {"nodes": 1, "command": ["x"], "image": "i"}
JOB: dict[str, Any] = {"name": "a", "backend": "kubernetes", "roles": {"worker": ROLE}}

SPECS: dict[str, dict[str, Any]] = {
    "an unfinished template": JOB | {"env": {"A": "${job." * 2_000 + " " * 2_000}},
    "a large template": JOB | {"outputs": {"logs": "${job." + " " * 200_000}},
    "unknown fields": JOB | {f"comand{number}": 0 for number in range(15_000)},
    "roles": JOB | {"roles": {f"r{number}": ROLE for number in range(4_000)}},
    "a command as a text": JOB | {"roles": {"worker": ROLE | {"command": "a" * 250_000}}},
    "a very large text": JOB | {"roles": {"worker": ROLE | {"command": "a" * 1_500_000}}},
}

PLANS: dict[str, dict[str, Any]] = {
    "pods of unknown roles": {"createPods": [{"type": f"a{number}"} for number in range(8_000)]},
    "pods with unknown fields": {"createPods": [{"type": "worker", "idd": 1} for _ in range(8_000)]},
    "a very large plan": {"createPods": [{"type": f"a{number}"} for number in range(100_000)]},
}

SECONDS = 15
"""Of processor time for each of these, of which the slowest takes two; without bounds they take minutes to years."""


def read_as_operator(spec: dict[str, Any]) -> None:
    fields = {name: value for name, value in spec.items() if name != "name"}
    thing = {"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "spec": fields}
    TrainingJobResource.model_validate(thing).job()


def carry_out(plan: dict[str, Any]) -> None:
    content = {"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ScalePlan", "spec": {"ownerJob": "j", **plan}}
    read = read_scale_plan(SpecDocument(data=content, lines={}, folder=None))
    requests_of(read, {"worker": KnownRole(nodes=2)})


READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "validate_spec": validate_spec,
    "read_accepted": read_accepted,
    "operator": read_as_operator,
    "plan": carry_out,
}


def read(reader: str, text: str) -> None:
    with suppress(SpecError):
        READERS[reader]({**SPECS, **PLANS}[text])


CASES = [
    *((reader, spec) for reader in ("validate_spec", "read_accepted", "operator") for spec in SPECS),
    *(("plan", plan) for plan in PLANS),
]


@pytest.mark.parametrize(("reader", "text"), CASES)
def test_what_any_author_may_write_is_read_in_bounded_time(reader: str, text: str):
    assert ends_within(SECONDS, read, reader, text)


def test_an_error_has_no_more_lines_than_people_read():
    with pytest.raises(SpecError) as refused:
        validate_spec(SPECS["unknown fields"])
    assert len(refused.value.problems) == 15_000
    assert str(refused.value).splitlines()[MOST_PROBLEMS:] == [f"and {15_000 - MOST_PROBLEMS:,} more problems"]


def test_what_refers_to_itself_is_refused():
    endless: dict[str, Any] = dict(JOB)
    endless["labels"] = endless
    with pytest.raises(SpecError, match="is not read"):
        validate_spec(endless)


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("${job.name}", "a"),
        ("${ job.name }", "a"),
        ("${job.name}-${job.namespace}", "a-n"),
        ("${job.${job.name}}", "${job.a}"),
        ("${job.name", "${job.name"),
        ("${jobs.name}", "${jobs.name}"),
        ("$HOME/${job.name}", "$HOME/a"),
    ],
)
def test_templates_are_filled_in(template: str, filled: str):
    assert fill_template(template, name="a", namespace="n") == filled
