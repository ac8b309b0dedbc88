"""Tests of what DLRover's ScalePlans become, in the forms that its examples, its operator and its master had."""

from __future__ import annotations

import pytest

from perdure.client.scale_plans import KnownRole, describe, requests_of
from perdure.contract import RelaunchRequest, ScaleRequest
from perdure.spec.errors import SpecError
from perdure.spec.importers.scaleplan import read_scale_plan_file

ROLES = {
    "worker": KnownRole(nodes=4, requests={"cpu": "500m", "memory": "256Mi"}, gpus=8),
    "ps": KnownRole(nodes=2, requests={"cpu": "1"}),
}

HEAD = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ScalePlan
metadata: {name: plan, labels: {scale-type: manual, elasticjob-name: deepctr}}
spec:
  ownerJob: deepctr
"""

GOLDEN: dict[str, tuple[str, list[str]]] = {
    "numbers_alone": (
        "  replicaResourceSpecs: {ps: {replicas: 3}}",
        ["scale ps to 3 nodes"],
    ),
    "numbers_and_resources": (
        """
  replicaResourceSpecs:
    ps: {replicas: 1, resource: {cpu: "0.5", memory: 256Mi}}
    worker: {replicas: 2, resource: {cpu: "0.5", memory: 256Mi}}""",
        ["scale ps to 1 node, new nodes with 0.5 of cpu and 256Mi of memory", "scale worker to 2 nodes"],
    ),
    "the_older_spelling_with_a_capital_role": (
        "  manualScaling: True\n  replicaResourceSpec: {PS: {replicas: 1}}",
        ["scale ps to 1 node"],
    ),
    "resources_alone_keep_the_number": (
        "  replicaResourceSpecs: {worker: {resource: {memory: 1Gi}}}",
        ["scale worker to 4 nodes, new nodes with 1Gi of memory"],
    ),
    "migrations_by_both_forms_of_names": (
        """
  migratePods:
    - {name: deepctr-edljob-ps-0, resource: {cpu: 4, memory: "1024Mi"}}
    - {name: deepctr-worker-1, resource: {cpu: "0.5"}}""",
        ["replace node 0 of ps by one with 4 of cpu and 1024Mi of memory", "replace node 1 of worker"],
    ),
    "a_migration_of_a_pod_of_perdure": (
        "  migratePods: [{name: deepctr-worker-3-2f0c9a1d2}]",
        ["replace node 3 of worker"],
    ),
    "a_scale_comes_before_migrations": (
        """
  migratePods: [{name: deepctr-edljob-ps-0}]
  replicaResourceSpecs: {worker: {replicas: 6}}""",
        ["scale worker to 6 nodes", "replace node 0 of ps"],
    ),
    "created_pods_are_more_nodes": (
        """
  createPods:
    - {name: deepctr-edljob-worker-4, id: 4, type: worker, rankIndex: 4, resource: {cpu: "2"}}
    - {type: worker}""",
        ["scale worker to 6 nodes, new nodes with 2 of cpu"],
    ),
    "removed_pods_are_fewer_nodes": (
        "  removePods: [deepctr-edljob-worker-3, deepctr-edljob-worker-2]",
        ["scale worker to 2 nodes"],
    ),
    "removed_pods_within_the_stated_number": (
        "  removePods: [{name: deepctr-edljob-worker-3}]\n  replicaResourceSpecs: {worker: {replicas: 3}}",
        ["scale worker to 3 nodes"],
    ),
    "a_pod_in_the_place_of_another_replaces_it": (
        """
  createPods: [{name: deepctr-edljob-worker-7, id: 7, type: worker, rankIndex: 1, resource: {memory: 8Gi}}]
  removePods: [{name: deepctr-edljob-worker-1, id: 1, type: worker, rankIndex: 1}]""",
        ["replace node 1 of worker by one with 8Gi of memory"],
    ),
    "the_misspelt_rank_counts": (
        "  migratePods: [{name: x, type: worker, id: 9, randIndex: 2}]",
        ["replace node 2 of worker"],
    ),
    "gpus_that_are_the_job_s": (
        '  replicaResourceSpecs: {worker: {replicas: 5, resource: {nvidia.com/gpu: "8", cpu: 500m}}}',
        ["scale worker to 5 nodes"],
    ),
}

REFUSED: dict[str, tuple[str, str]] = {
    "another_role": ("  replicaResourceSpecs: {chief: {replicas: 1}}", 'has no role "chief"; it has worker or ps'),
    "no_nodes": ("  replicaResourceSpecs: {worker: {replicas: 0}}", "expected an integer of at least 1"),
    "other_gpus": ('  replicaResourceSpecs: {worker: {resource: {gpu: "4"}}}', "it is 8 for each node"),
    "another_resource": ("  replicaResourceSpecs: {worker: {resource: {disk: 1Gi}}}", "only cpu and memory can change"),
    "a_nonsense_amount": ("  replicaResourceSpecs: {worker: {resource: {cpu: lots}}}", 'got "lots"'),
    "memory_without_a_unit": ('  replicaResourceSpecs: {worker: {resource: {memory: "4096"}}}', "expected a unit"),
    "a_node_that_would_stay": ("  removePods: [deepctr-edljob-worker-0]", "releases the others"),
    "a_node_that_is_not_there": ("  removePods: [deepctr-edljob-worker-9]", "its nodes are 0 to 3"),
    "all_nodes": ("  removePods: [x-ps-0, x-ps-1]", "would have no node"),
    "a_replacement_of_a_node_that_leaves": (
        "  migratePods: [x-worker-3]\n  replicaResourceSpecs: {worker: {replicas: 2}}",
        "has no node 3 to replace",
    ),
    "a_name_without_a_type": ("  migratePods: [main]", "ends with its type and number"),
    "a_type_without_a_number": ("  migratePods: [{type: worker}]", "the number of the node"),
    "new_nodes_that_differ": (
        "  createPods: [{type: worker, resource: {cpu: 2}}, {type: worker, resource: {cpu: 3}}]",
        "other resources than further nodes",
    ),
    "nothing": ("  psHosts: [x]", "there is nothing to do"),
    "a_role_twice": (
        "  replicaResourceSpecs: {ps: {replicas: 1}}\n  replicaResourceSpec: {PS: {replicas: 2}}",
        "stated twice",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_plan_becomes_requests(name: str) -> None:
    spec, expected = GOLDEN[name]
    plan = read_scale_plan_file(f"{HEAD}{spec}\n")
    assert plan.job == "deepctr"
    assert [describe(request) for request in requests_of(plan, ROLES)] == expected
    assert plan.warnings == ()


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_honoured_refuses_the_plan(name: str) -> None:
    spec, expected = REFUSED[name]
    with pytest.raises(SpecError) as refusal:
        requests_of(read_scale_plan_file(f"{HEAD}{spec}\n"), ROLES)
    assert expected in str(refusal.value)


def test_all_fields_that_cannot_be_honoured_are_named_with_their_lines() -> None:
    text = f"{HEAD}  replicaResourceSpecs: {{chief: {{replicas: 1}}}}\n  removePods: [x-worker-0]\n"
    with pytest.raises(SpecError) as refusal:
        requests_of(read_scale_plan_file(text), ROLES)
    assert [(one.path, one.line) for one in refusal.value.problems] == [
        ("spec.replicaResourceSpecs.chief", 7),
        ("spec.removePods[0]", 8),
    ]


def test_requests_name_roles_and_the_reason() -> None:
    text = f"{HEAD}  replicaResourceSpecs: {{ps: {{replicas: 3}}}}\n  migratePods: [x-worker-1]\n"
    assert requests_of(read_scale_plan_file(text), ROLES, reason="more servers") == (
        ScaleRequest(nodes="3", role="ps", reason="more servers"),
        RelaunchRequest(rank=1, role="worker", reason="more servers"),
    )


def test_fields_without_effect_are_told() -> None:
    text = f"{HEAD}  psHosts: [ps-0.svc:2222]\n  replicaResourceSpecs: {{ps: {{replicas: 3, color: red}}}}\n"
    plan = read_scale_plan_file(text)
    assert requests_of(plan, ROLES)
    assert [warning.path for warning in plan.warnings] == ["spec.psHosts", "spec.replicaResourceSpecs.ps.color"]


def test_resources_without_a_meaning_on_the_backend_are_told() -> None:
    plan = read_scale_plan_file(f"{HEAD}  replicaResourceSpecs: {{ps: {{replicas: 3, resource: {{cpu: 8}}}}}}\n")
    (request,) = requests_of(plan, {"ps": KnownRole(nodes=2, chooses_machines=False)})
    assert request.resources == {}
    assert "request no resources" in str(plan.warnings[0])


def test_a_plan_names_its_job_by_a_label_alone() -> None:
    label = "metadata: {name: plan, labels: {elasticjob.dlrover/name: llama}}"
    text = f"apiVersion: elastic.iml.github.io/v1alpha1\nkind: ScalePlan\n{label}\nspec: {{manualScaling: true}}\n"
    assert read_scale_plan_file(text).job == "llama"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD.replace("deepctr}}", "other}}"), 'expected "deepctr", as spec.ownerJob states'),
        (HEAD.replace("kind: ScalePlan", "kind: ElasticJob"), "kind: "),
        (HEAD.replace("v1alpha1", "v2"), "apiVersion: "),
        ("[]", "ScalePlan"),
        (f"{HEAD}---{HEAD}", "2 documents"),
        (f"{HEAD}  removePods: 4\n", "a list"),
        (f"{HEAD}  removePods: [4]\n", "the name of a pod"),
        (f"{HEAD}  migratePods: [[1]]\n", "the name of a pod"),
        (f"{HEAD}  replicaResourceSpecs: [ps]\n", "a mapping"),
        (f"{HEAD}  replicaResourceSpecs: {{ps: 3}}\n", "a mapping"),
        (f"{HEAD}  replicaResourceSpecs: {{ps: {{replicas: two}}}}\n", "an integer"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, expected: str) -> None:
    with pytest.raises(SpecError) as refusal:
        read_scale_plan_file(f"{text}\n")
    assert expected in str(refusal.value)
