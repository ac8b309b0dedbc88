"""Tests of running jobs' specifications with a release that would refuse them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from perdure.contract.base import Message
from perdure.spec.accepted import AcceptedSpec, read_accepted
from perdure.spec.errors import SpecError
from perdure.spec.validate import MAX_BYTES, parse_spec

SPEC: dict[str, Any] = {
    "name": "job",
    "env": {"OUT": "/out/${job.name}"},
    "roles": {"worker": {"nodes": "2:4", "command": ["torchrun", "${job.name}.py"]}},
    "timing": {"lease": {"heartbeat": "3s", "timeout": "10s"}},
}


class Request(Message):
    spec: AcceptedSpec


@pytest.mark.parametrize(
    "refused",
    [
        {"name": "A name with spaces"},
        {"a_field_that_is_gone": 1},
        {"roles": {"worker": {"nodes": {"min": 3, "max": 2}, "command": ["torchrun"]}}},
        {"roles": {"worker": {"nodes": {"min": 2, "max": 100_000, "unit": 3}, "command": ["torchrun"], "gone": True}}},
        {"retry": {"max_restarts": -1, "fatal_exit_codes": [0, 900]}},
        {"retry": {"rules": [{"match": {"log": "(", "signals": ["SIGNEW"]}, "action": "stop"}]}},
        {"env": {"9": "${job.gone}"}},
        {"env": {"A": "1"}, "secrets": {"A": "name/key"}},
        {"workdir": {"path": "/a", "git": None, "ref": None}},
        {"recovery": {"spares": 0, "replace_timeout": "5m"}},
        {"outputs": {"logs": "s3://logs/${job.name}", "report": None}},
        {"notifications": []},
        {"labels": {"": "?"}},
        {"env": {"LONG": "x" * MAX_BYTES}},
    ],
)
def test_what_this_release_refuses_is_read_for_a_job_that_runs(refused: dict[str, Any]):
    data = SPEC | refused
    with pytest.raises(SpecError):
        parse_spec(data)
    spec = read_accepted(data)
    assert spec.timing.lease.timeout == timedelta(seconds=10)
    assert spec.roles["worker"].command[0] == "torchrun"
    known = {name: value for name, value in refused.items() if name in type(spec).model_fields}
    assert spec.model_fields_set >= known.keys()
    # A group, a backend and an agent get it whole.
    assert Request.model_validate_json(Request(spec=spec).model_dump_json()).spec == spec


def test_what_is_right_is_read_as_ever():
    assert read_accepted(SPEC) == parse_spec(SPEC)
    assert Request.model_validate({"spec": SPEC}).spec.timing == parse_spec(SPEC).timing


@pytest.mark.parametrize("data", [None, [], "text", {}, {"name": "job"}, {"name": "job", "roles": {"worker": 1}}])
def test_what_is_no_specification_is_refused(data: Any):
    with pytest.raises(SpecError):
        read_accepted(data)


def test_retired_fields_change_nothing_else():
    retired = {
        "workdir": {"path": "/a", "exclude": ["data/"], "git": None, "ref": None},
        "recovery": {"spares": 0, "on_capacity_loss": "wait"},
        "outputs": {"logs": None, "report": None},
        "notifications": [],
    }
    kept = {"workdir": {"path": "/a", "exclude": ["data/"]}, "recovery": {"on_capacity_loss": "wait"}}
    assert read_accepted(SPEC | retired).model_dump() == parse_spec(SPEC | kept).model_dump()
