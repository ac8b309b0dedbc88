"""Tests of TF_CONFIG, which the launcher makes for roles of TensorFlow when it starts their processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.spec.validate import parse_spec
from perdure.workflows.policy.facts.events import SuspendRequested
from perdure.workflows.policy.roles.addresses import addresses_by_role
from perdure.workflows.policy.state.job import JobState
from perdure_launcher.config import LauncherConfig
from perdure_launcher.tensorflow import tensorflow_environment
from tests.policy.job_of_roles import NOW, Roles


def roles_of(**roles: dict[str, Any]) -> dict[str, Any]:
    """All roles of a job that has just begun, as its agents write them."""
    job = parse_spec({"name": "a", "roles": {n: {"nodes": 1, "command": ["python"], **r} for n, r in roles.items()}})
    known = addresses_by_role(JobState.begin(job, uid="0123abcd", now=NOW), job)
    return {name: role.model_dump(mode="json") for name, role in known.items()}


def environment(roles: dict[str, Any], role: str, slot: int = 0, **env: str) -> dict[str, Any]:
    node = LauncherConfig(command=("python",), run_id="a", run_directory=Path(), env=env, role=role, slot=slot)
    return {name: json.loads(value) for name, value in tensorflow_environment(node, roles).items()}


WORKER = {"nodes": 2, "ready": {"port": 2223}}
ROLES = roles_of(ps={"ready": {"port": 2222}}, worker=WORKER, evaluator={}, data={})
CLUSTER = {"worker": ["127.0.0.1:2223", "127.0.0.1:2224"], "ps": ["127.0.0.1:2222"]}


@pytest.mark.parametrize(("role", "slot"), [("worker", 1), ("ps", 0), ("evaluator", 0)])
def test_tensorflow_finds_the_other_processes_before_they_run(role: str, slot: int) -> None:
    assert environment(ROLES, role, slot) == {"TF_CONFIG": {"cluster": CLUSTER, "task": {"type": role, "index": slot}}}


def test_a_role_without_nodes_now_keeps_its_addresses_in_the_cluster() -> None:
    job = Roles(chief={"nodes": 1, "ready": {"port": 2222}}, worker=WORKER).runs("chief", "worker")
    job.take(SuspendRequested(role="worker")).left("worker")
    assert not any(node.alive for node in job.view("worker").nodes.values())
    known = {name: role.model_dump(mode="json") for name, role in addresses_by_role(job.state, job.job).items()}
    assert known["worker"]["addresses"] == []
    assert environment(known, "chief")["TF_CONFIG"]["cluster"]["worker"] == CLUSTER["worker"]


def test_a_role_that_serves_alone_has_a_cluster() -> None:
    cluster = {"worker": ["127.0.0.1:2223", "127.0.0.1:2224"]}
    assert environment(roles_of(worker=WORKER), "worker")["TF_CONFIG"]["cluster"] == cluster


def test_only_roles_of_tensorflow_have_a_cluster_unless_the_job_says_what_it_is() -> None:
    assert environment(ROLES, "data") == {}
    assert environment(ROLES, "worker", TF_CONFIG="mine") == {}
    assert environment(roles_of(worker={}, evaluator={}), "evaluator") == {}
    assert environment(roles_of(worker={}), "worker") == {}
