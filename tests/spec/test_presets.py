"""Tests of jobs of a kind whose roles and relations are known."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.spec.accepted import read_accepted
from perdure.spec.errors import SpecError
from perdure.spec.role_relations import roles_restarted_with, roles_that_end
from perdure.spec.validate import parse_spec, to_mapping, validate_spec

COMMAND = ["python", "train.py"]


def servers(**roles: dict[str, Any] | None) -> dict[str, Any]:
    return {"name": "a", "preset": "parameter-server", "roles": {"worker": {"nodes": 2, "command": COMMAND}, **roles}}


def test_numbers_of_nodes_and_one_command_become_the_roles_of_a_job_with_parameter_servers():
    spec, warnings = validate_spec(servers(ps={"nodes": 3}, evaluator=None, init={"nodes": 1, "command": ["ls"]}))
    assert not warnings
    assert {name: role.nodes.max for name, role in spec.roles.items()} == {
        "worker": 2,
        "ps": 3,
        "evaluator": 1,
        "init": 1,
        "chief": 1,
    }
    assert [name for name, role in spec.roles.items() if role.command != COMMAND] == ["init"]
    assert roles_that_end(spec.roles) == ("chief",)
    restarted = {name: roles_restarted_with(name, spec.roles) for name in spec.roles}
    assert {name: others for name, others in restarted.items() if others} == {"ps": ("chief",)}
    assert roles_restarted_with("worker", spec.roles, scaled=True) == ("chief",)


def test_what_a_job_states_stands_above_its_preset():
    stated = {"nodes": 1, "command": ["serve"], "ready": {"port": 6000}, "restart_with": []}
    spec = parse_spec(servers(ps=stated, chief={"ends_job": False}))
    assert spec.roles["ps"].command == ["serve"]
    assert roles_restarted_with("ps", spec.roles) == ()
    assert spec.roles["chief"].ends_job is False


def test_a_job_with_a_preset_is_the_same_however_often_it_is_read():
    spec = parse_spec(servers(ps={"nodes": 1}))
    assert parse_spec(to_mapping(spec)) == spec
    assert read_accepted(servers(ps={"nodes": 1})) == spec, "also a workflow that was started with plain JSON"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (servers(), "preset is parameter-server, and roles has no ps; add it, with nodes"),
        (servers(ps={}), "roles.ps.nodes: missing"),
        (servers(ps={"nodes": 1}) | {"preset": "gan"}, "preset: .*parameter-server"),
    ],
)
def test_what_does_not_fit_a_preset_is_refused(data: dict[str, Any], problem: str):
    with pytest.raises(SpecError, match=problem):
        validate_spec(data)
