"""Tests of what roles state of each other: which statements are refused, and what the accepted ones mean."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.spec.errors import SpecError
from perdure.spec.role_relations import order_of, roles_collocated_with, roles_restarted_with, roles_that_end
from perdure.spec.validate import parse_spec, validate_spec


def job(backend: str = "local", **roles: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("_", "-"): {"nodes": 1, "command": ["a"], **fields} for name, fields in roles.items()}
    return {"name": "a", "backend": backend, "roles": named}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            job(trainer={"depends_on": {"pss": "ready"}}, ps={}),
            'roles.trainer.depends_on: names "pss", which is no role of this job; it has ps',
        ),
        (job(trainer={"depends_on": {"ps": "started"}}, ps={}), "expected completed or ready"),
        (job(trainer={"depends_on": {"trainer": "ready"}}), "roles.trainer.depends_on: names the role itself"),
        (job(trainer={"restart_with": ["reward"]}, ps={}), 'roles.trainer.restart_with: names "reward", which is no'),
        (
            job(trainer={"restart_on_scale": ["trainer"]}, ps={}),
            "roles.trainer.restart_on_scale: names the role itself",
        ),
        (job(trainer={"collocate": ["reward"]}, ps={}), 'roles.trainer.collocate: names "reward", which is no role'),
        (job(trainer={"collocate": ["trainer"]}, ps={}), "roles.trainer.collocate: names the role itself; remove it"),
        (
            job(trainer={"collocate": ["ps"], "nodes": 2}, ps={"nodes": 3}),
            "roles.trainer.collocate: node N of trainer shares the machine of node N of ps, and they have 2 and",
        ),
        (
            job(trainer={"nodes": "4:6", "node_group": 4}),
            "roles.trainer: node_group is 4, and nodes is 4:6; set nodes to a multiple of it",
        ),
        (job(trainer={"node_group": 0}), "roles.trainer.node_group: got 0; expected an integer of at least 1"),
        (
            job(a={"depends_on": {"b": "ready"}}, b={"depends_on": {"c": "ready"}}, c={"depends_on": {"a": "ready"}}),
            "depends_on: the roles wait for each other: ",
        ),
        (
            job(trainer={"depends_on": {"data": "completed"}}, data={"on_failure": "ignore"}),
            "roles.trainer.depends_on.data: data has on_failure: ignore, so it may never be completed; set its",
        ),
        (job(a={"ends_job": False}, b={"ends_job": False}), "roles: every role has ends_job: false"),
        (job(a={"ends_job": False}), "roles: every role has ends_job: false, so nothing ends the job"),
        (job(trainer={"on_failure": "ignore"}), "roles.trainer.on_failure: is ignore, and the job succeeds when"),
        (job(ps={}, ps_1={}), "roles.ps-1: begins like the names of the nodes of the role ps, such as ps-0; rename"),
        (job(ps={}, ps_1_b={}), "roles.ps-1-b: begins like the names of the nodes of the role ps"),
        (job(ps={"ready": {"port": 1}, "nproc_per_node": 2}), "roles.ps: nproc_per_node is 2, and a node of a role"),
        (job(ps={"ready": {"port": 1}, "rendezvous": "torchrun"}), "roles.ps: rendezvous is torchrun, and a role with"),
        (job(ps={"ready": {"port": 0}}), "roles.ps.ready.port: got 0; expected an integer of at least 1"),
        (job(ps={"ready": {"http": "/"}}), "roles.ps.ready.port: missing"),
        (
            job(ps={"ready": {"port": 1, "http": "health"}}),
            'roles.ps.ready.http: got "health"; expected a path such as',
        ),
        (
            job(trainer={}, ps={"ready": {"port": 80}, "nodes": 3}, reward={"ready": {"port": 82}}),
            "uses port 82 plus N: 82 is a port of ps, too; set ports that are as far apart",
        ),
        (job(trainer={}, ps={"ready": {"port": 65535}, "nodes": 2}), "65536 is no port"),
    ],
)
def test_a_wrong_relation_is_refused_with_its_place_and_a_remedy(data: dict[str, Any], text: str):
    with pytest.raises(SpecError) as caught:
        validate_spec(data)
    assert text in str(caught.value)


@pytest.mark.parametrize("backend", ["local", "kubernetes", "joined"])
def test_every_backend_runs_several_roles(backend: str):
    image = {"image": "a"} if backend == "kubernetes" else {}
    validate_spec(job(backend, trainer=image, ps={"ready": {"port": 1}, **image}))


def test_names_that_only_begin_alike_are_accepted():
    validate_spec(job(ps={}, ps_b={}, psx={}, reward={}, reward2={}))


@pytest.mark.parametrize(
    ("data", "ending"),
    [
        (job(worker={}), ("worker",)),
        (job(rollout={}), ("rollout",)),
        (job(rollout={"ready": {"port": 1}}), ("rollout",)),
        (job(evaluator={}, worker={}, chief={}), ("worker", "chief")),
        (job(evaluator={}, trainer={"ends_job": False}), ("evaluator",)),
        (job(a={}, b={}), ("a", "b")),
        (job(a={}, b={"ready": {"port": 1}}), ("a",)),
        (job(trainer={}, a={"ends_job": True}), ("a",)),
    ],
)
def test_roles_that_end_a_job(data: dict[str, Any], ending: tuple[str, ...]):
    assert roles_that_end(parse_spec(data).roles) == ending


def test_a_role_comes_after_those_that_it_waits_for():
    data = job(
        trainer={"depends_on": {"ps": "ready", "data": "completed"}}, ps={"depends_on": {"data": "completed"}}, data={}
    )
    assert order_of(parse_spec(data).roles) == ("data", "ps", "trainer")


def test_roles_restart_with_others_and_those_with_others_again():
    roles = parse_spec(job(a={"restart_with": ["b"]}, b={"restart_with": ["c"]}, c={}, d={"on_failure": "job"})).roles
    assert [roles_restarted_with(name, roles) for name in "abcd"] == [("b", "c"), ("c",), (), ("a", "b", "c")]


def test_roles_share_machines_whichever_of_them_states_it():
    roles = parse_spec(job(a={"collocate": ["b"]}, b={}, c={"collocate": ["b"]}, d={})).roles
    assert [roles_collocated_with(name, roles) for name in "abcd"] == [("b", "c"), ("a", "c"), ("a", "b"), ()]


def test_roles_restart_with_one_that_is_scaled_and_those_with_them():
    roles = parse_spec(job(a={"restart_on_scale": ["b"]}, b={"restart_with": ["c"]}, c={}, d={})).roles
    assert roles_restarted_with("a", roles) == ()
    assert roles_restarted_with("a", roles, scaled=True) == ("b", "c")
