"""Tests of the objects for each gang system, and of when a pod may be created: pure functions."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.activities.nodes.kubernetes import KubernetesSettings
from perdure.activities.nodes.kubernetes.facts import event_of, is_held
from perdure.activities.nodes.kubernetes.gangs import GangAdapter, adapter_of
from perdure.activities.nodes.kubernetes.naming import INCARNATION, RANK
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.activities.nodes.kubernetes.pod import pod_of
from perdure.activities.nodes.kubernetes.site_policy import SitePolicy
from perdure.contract import NodeCredentials, NodeEventKind, NodeRequest
from perdure.contract.names import node_name
from perdure.spec.job import JobSpec

UID = "0a1b2c3d"
POLICY = SitePolicy(priority_classes=("high",))


def request(
    rank: int = 0, *, incarnation: int = 1, name: str = "a", role: dict[str, Any] | None = None, **spec: Any
) -> NodeRequest:
    """A node of an elastic job: two nodes, and two units of two nodes beyond them."""
    nodes = {"min": 2, "max": 6, "unit": 2}
    role = {"nodes": nodes, "command": ["torchrun", "train.py"], "image": "torch:1", **(role or {})}
    job = {"name": name, "backend": "kubernetes", "queue": "research", "roles": {"worker": role}} | spec
    node = NodeCredentials(uid=UID, role="worker", rank=rank, incarnation=incarnation, token="t")
    return NodeRequest(
        node=node,
        name=node_name(name, node),
        spec=JobSpec.model_validate(job),
        job_id="job/default/a",
        job_first_run_id="run",
        group_id="group",
        task_queue="queue",
    )


def manifest(asked: NodeRequest, adapter: GangAdapter) -> dict[str, Any]:
    return pod_of(asked, KubernetesSettings(agent_image="perdure:1", gangs=adapter, policy=POLICY))


def test_kueue_has_a_group_for_the_base_and_one_per_unit():
    groups: dict[int, str] = {}
    for rank in range(6):
        metadata = manifest(request(rank), adapter_of("kueue"))["metadata"]
        assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "research"
        assert metadata["annotations"] == {
            "kueue.x-k8s.io/pod-group-total-count": "2",
            "kueue.x-k8s.io/pod-group-fast-admission": "true",
        }
        groups[rank] = metadata["labels"]["kueue.x-k8s.io/pod-group-name"]
    base, first, second = f"a-worker-0-{UID}", f"a-worker-2-{UID}", f"a-worker-4-{UID}"
    assert groups == {0: base, 1: base, 2: first, 3: first, 4: second, 5: second}


def test_kueue_s_names_fit_however_long_the_job_s_is():
    long = request(1998, name="j" * 40, role={"nodes": {"min": 2, "max": 2000, "unit": 2}})
    name = manifest(long, adapter_of("kueue"))["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"]
    assert len(name) <= 63
    assert name.endswith(f"-worker-1998-{UID}")


def test_a_part_of_one_node_is_a_pod_of_its_own_and_may_have_a_priority_of_its_own():
    adapter = adapter_of("kueue", elastic_priority_class="elastic")
    for rank, classes in ((0, {}), (1, {"kueue.x-k8s.io/priority-class": "elastic"})):
        labels = manifest(request(rank, role={"nodes": "1:3"}), adapter)["metadata"]["labels"]
        kueue = {key: value for key, value in labels.items() if "kueue" in key}
        assert kueue == {"kueue.x-k8s.io/queue-name": "research", **classes}


@pytest.mark.parametrize("requirement", ["required", "preferred"])
def test_kueue_is_told_the_topology_in_place_of_the_scheduler(requirement: str):
    pod = manifest(request(role={"topology": {requirement: "cloud.example/rack"}}), adapter_of("kueue"))
    assert pod["metadata"]["annotations"][f"kueue.x-k8s.io/podset-{requirement}-topology"] == "cloud.example/rack"
    assert "affinity" not in pod["spec"]


def test_pods_of_a_group_of_kueue_s_stay_alike():
    away = {"avoids": ("gpu-17",)}
    assert "affinity" not in manifest(request(1).model_copy(update=away), adapter_of("kueue"))["spec"]
    for alone in (request(2, role={"nodes": "1:3"}), request(1, queue=None)):
        assert "affinity" in manifest(alone.model_copy(update=away), adapter_of("kueue"))["spec"]


def test_jobs_without_a_queue_are_none_of_kueue_s_business():
    asked = request(2, queue=None)
    adapter = adapter_of("kueue")
    assert manifest(asked, adapter) == manifest(asked, adapter_of(""))
    assert not adapter.needs(asked)


@pytest.mark.parametrize(
    ("system", "version", "spec", "metadata", "of_pods"),
    [
        (
            "volcano",
            "scheduling.volcano.sh/v1beta1",
            {
                "minMember": 2,
                # Twice the training container and the agent beside it.
                "minResources": {
                    "cpu": "16.100",
                    "memory": str(2 * (64 * 1024 + 128) * 1024**2),
                    "nvidia.com/gpu": "16",
                },
                "queue": "research",
                "priorityClassName": "high",
            },
            {"annotations": {"scheduling.k8s.io/group-name": f"perdure-a-{UID}"}},
            {"schedulerName": "volcano"},
        ),
        (
            "coscheduling",
            "scheduling.x-k8s.io/v1alpha1",
            {
                "minMember": 2,
                "minResources": {
                    "cpu": "16.100",
                    "memory": str(2 * (64 * 1024 + 128) * 1024**2),
                    "nvidia.com/gpu": "16",
                },
            },
            {
                "labels": {
                    "scheduling.x-k8s.io/pod-group": f"perdure-a-{UID}",
                    "kueue.x-k8s.io/queue-name": "research",
                }
            },
            {"schedulerName": "scheduler-plugins-scheduler"},
        ),
        (
            "workload",
            "scheduling.k8s.io/v1alpha2",
            {"schedulingPolicy": {"gang": {"minCount": 2}}},
            {"labels": {"kueue.x-k8s.io/queue-name": "research"}},
            {"schedulingGroup": {"podGroupName": f"perdure-a-{UID}"}},
        ),
    ],
)
def test_schedulers_with_pod_groups_have_one_for_the_whole_job(
    system: str, version: str, spec: dict[str, Any], metadata: dict[str, Any], of_pods: dict[str, Any]
):
    asked = request(5, role={"resources": {"cpu": 8, "memory": "64Gi", "gpu": 8}}, priority_class="high")
    adapter = adapter_of(system)
    assert adapter.template(asked) == {"metadata": metadata, "spec": of_pods}
    ((collection, content, _),) = adapter.shared_objects(asked, manifest(asked, adapter))
    assert collection == f"/apis/{version}/namespaces/default/podgroups"
    name = {"name": f"perdure-a-{UID}"}
    assert content == {"apiVersion": version, "kind": "PodGroup", "metadata": name, "spec": spec}


@pytest.mark.parametrize(
    ("topology", "told"),
    [
        ({"required": "2"}, {"mode": "hard", "highestTierAllowed": 2}),
        ({"preferred": "3"}, {"mode": "soft", "highestTierAllowed": 3}),
        ({"required": "topology.kubernetes.io/zone"}, None),
    ],
)
def test_volcano_is_told_tiers_and_the_scheduler_labels(topology: dict[str, str], told: dict[str, Any] | None):
    asked, adapter = request(role={"topology": topology}), adapter_of("volcano")
    pod = manifest(asked, adapter)
    ((_, content, _),) = adapter.shared_objects(asked, pod)
    assert content["spec"].get("networkTopology") == told
    assert ("affinity" in pod["spec"]) == (told is None)


@pytest.mark.parametrize("system", ["volcano", "coscheduling", "workload"])
def test_each_of_several_roles_has_a_group_with_its_own_minimum(system: str):
    one = {"nodes": 3, "command": ["torchrun", "train.py"], "image": "torch:1"}
    asked = request(roles={"worker": one, "ps": one})
    adapter = adapter_of(system)
    ((_, content, _),) = adapter.shared_objects(asked, manifest(asked, adapter))
    assert content["metadata"]["name"] == f"perdure-a-worker-{UID}"
    assert content["metadata"]["name"] in str(adapter.template(asked))
    assert "3" in str(content["spec"])


def test_a_job_that_was_scaled_has_another_minimum():
    scaled = request(role={"nodes": 4}).model_copy(update={"nodes_min": 3})
    adapter = adapter_of("volcano")
    ((_, content, _),) = adapter.shared_objects(scaled, manifest(scaled, adapter))
    assert content["spec"]["minMember"] == 3


def pod(
    rank: int,
    *,
    incarnation: int = 1,
    gated: bool = False,
    machine: str = "",
    deleted: bool = False,
    **status: Any,
) -> Pod:
    status = {"phase": "Running" if machine else "Pending", **status}
    gates = [{"name": "kueue.x-k8s.io/admission"}] if gated else []
    labels = {RANK: str(rank), INCARNATION: str(incarnation)}
    metadata: dict[str, Any] = {"name": "p", "uid": "u", "labels": labels, "finalizers": ["kueue.x-k8s.io/managed"]}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return Pod.model_validate(
        {"metadata": metadata, "spec": {"nodeName": machine, "schedulingGates": gates}, "status": status}
    )


@pytest.mark.parametrize(
    ("rank", "pods", "obstacle"),
    [
        (0, [], ""),
        (2, [], "has not admitted the job's first 2 nodes yet"),
        (2, [pod(0, gated=True)], "has not admitted the job's first 2 nodes yet"),
        (2, [pod(0)], ""),
        (2, [pod(0, machine="m", phase="Failed")], "has not admitted the job's first 2 nodes yet"),
        (2, [pod(0, machine="m"), pod(2, machine="m")], "node 2.1, which it replaces, still counts"),
        (2, [pod(0, machine="m"), pod(2, gated=True)], "node 2.1, which it replaces, still counts"),
        (2, [pod(0, machine="m"), pod(2, gated=True, deleted=True)], ""),
        (2, [pod(0, machine="m"), pod(2, machine="m", phase="Failed", deleted=True)], ""),
        (0, [pod(0, machine="m", deleted=True)], "node 0.1, which it replaces, still counts"),
        (0, [pod(0, incarnation=2, gated=True)], ""),
    ],
)
def test_a_pod_of_kueue_s_waits_for_the_base_and_for_the_end_of_what_it_replaces(
    rank: int, pods: list[Pod], obstacle: str
):
    asked, adapter = request(rank, incarnation=2), adapter_of("kueue")
    assert {one.rank for one in pods} <= adapter.needs(asked)
    found = adapter.obstacle(asked, pods)
    assert obstacle in found
    assert bool(found) == bool(obstacle)


def test_a_pod_that_is_deleted_before_it_had_a_machine_is_gone_and_held():
    preempted = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted", "message": "Preempted"}
    waiting = pod(2, gated=True)
    gone = pod(2, gated=True, conditions=[preempted], deleted=True)
    assert (event_of(waiting).kind, is_held(waiting, "kueue.x-k8s.io/managed")) == (NodeEventKind.PENDING, False)
    assert event_of(gone).kind is NodeEventKind.GONE
    assert event_of(gone).reason == "its queue has evicted it (WorkloadEvicted: Preempted)"
    assert is_held(gone, "kueue.x-k8s.io/managed")
    assert not is_held(gone, "")


def test_a_site_names_its_system():
    environment = {"PERDURE_KUBERNETES_AGENT_IMAGE": "perdure:1", "PERDURE_KUBERNETES_GANGS": "slurm"}
    with pytest.raises(ValueError, match="'slurm' is not a gang system; expected one of kueue, volcano"):
        KubernetesSettings.from_environment(environment)
    with pytest.raises(ValueError, match="is Kueue's alone"):
        KubernetesSettings.from_environment(
            environment
            | {"PERDURE_KUBERNETES_GANGS": "volcano", "PERDURE_KUBERNETES_ELASTIC_PRIORITY_CLASS": "elastic"}
        )
