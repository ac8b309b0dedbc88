"""Tests of roles whose nodes share machines: what their pods require, and what the scheduler makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesBackend, KubernetesSettings
from perdure.activities.nodes.kubernetes.collocation import share_machine, siblings
from perdure.activities.nodes.kubernetes.gangs import adapter_of
from perdure.activities.nodes.kubernetes.objects import Pod
from perdure.activities.nodes.kubernetes.pod import pod_of
from perdure.base.kubernetes import KubernetesApi
from perdure.contract import NodeCredentials, NodeRequest
from perdure.contract.names import node_name
from perdure.spec.validate import parse_spec
from tests.kubernetes.pods import PodJob
from tests.support.waiting import eventually

SETTINGS = KubernetesSettings(agent_image="perdure:1")
NODES = 3


def request(role: str, rank: int = 0, incarnation: int = 1, *, job: PodJob | None = None, **spec: Any) -> NodeRequest:
    """A node of a job in which trainer and rollout share machines, and reward does not."""
    roles = {
        name: {"nodes": NODES, "command": ["true"], "image": "localhost/none", "image_pull_policy": "Never"}
        for name in ("trainer", "rollout", "reward")
    }
    roles["rollout"]["collocate"] = ["trainer"]
    namespace, uid = (job.namespace, job.uid) if job else ("default", "0a1b2c3d")
    node = NodeCredentials(uid=uid, role=role, rank=rank, incarnation=incarnation, token="t" * 16)
    return NodeRequest(
        node=node,
        name=node_name("a", node),
        spec=parse_spec({"name": "a", "namespace": namespace, "backend": "kubernetes", "roles": roles, **spec}),
        job_id=f"job/{namespace}/a",
        job_first_run_id="run",
        group_id="group",
        task_queue="queue",
    )


def required(asked: NodeRequest, *found: Pod) -> dict[str, Any]:
    """The labels of the pods on whose machine a pod must be."""
    pod = pod_of(asked, SETTINGS)
    share_machine(pod, asked, found, SETTINGS.gangs)
    (term,) = pod["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    expressions = term["labelSelector"]["matchExpressions"]
    assert all(
        pod["metadata"]["labels"][one["key"]] in one["values"] for one in expressions if one["operator"] == "In"
    ), "the first pod is permitted only because it matches its own term"
    return {one["key"].removeprefix("perdure.dev/"): one["values"] for one in expressions}


def known(asked: NodeRequest, *, deleted: bool = False, silent: bool = False) -> Pod:
    """A pod as the API server shows it."""
    status: dict[str, Any] = {"containerStatuses": [{"name": "training", "ready": True}]}
    statuses = {"Ready": "False" if silent else "True", "ContainersReady": "True"}
    status["conditions"] = [{"type": kind, "status": one} for kind, one in statuses.items()]
    pod = pod_of(asked, SETTINGS)
    if deleted:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return Pod.model_validate(pod | {"status": status})


def test_a_pod_goes_where_the_pods_of_its_node_in_the_other_roles_are():
    same = {"uid": ["0a1b2c3d"], "rank": ["1"]}
    assert required(request("trainer", 1)) == {**same, "role": ["trainer", "rollout"]}
    assert required(request("rollout", 1), known(request("trainer", 1))) == {**same, "role": ["rollout", "trainer"]}
    assert siblings(request("reward", 1)) == ""
    assert "perdure.dev/node" not in pod_of(request("reward"), SETTINGS)["metadata"]["labels"]


def test_a_new_pod_does_not_follow_those_that_will_not_run_again():
    dead = [known(request("trainer"), silent=True), known(request("trainer", incarnation=2), deleted=True)]
    before, other = known(request("rollout")), known(request("trainer", incarnation=3))
    names = required(request("rollout", incarnation=2), *dead, before, other)["node"]
    assert names == sorted(one.metadata.name for one in (*dead, before))


def test_pods_that_must_be_alike_cannot_share_machines_with_different_ones():
    asked, gangs = request("trainer", queue="research"), adapter_of("kueue")
    with pytest.raises(NodeRefused, match=r"^roles.trainer.collocate: the site's gang system"):
        share_machine(pod_of(asked, SETTINGS), asked, (), gangs)


async def machines(api: KubernetesApi, job: PodJob) -> dict[str, str]:
    """The machine of each node whose pod has one and is not being deleted."""
    return {
        f"{pod['metadata']['labels']['perdure.dev/role']}-{pod['metadata']['labels']['perdure.dev/rank']}": machine
        for pod in await api.list(job.pods_path)
        if (machine := pod["spec"].get("nodeName")) and "deletionTimestamp" not in pod["metadata"]
    }


@pytest.mark.long("cluster-faults")
async def test_the_scheduler_puts_the_nodes_of_collocated_roles_together(backend: KubernetesBackend, job: PodJob):
    for rank in range(NODES):
        for role in ("trainer", "rollout"):
            await backend.create(request(role, rank, job=job))

    async def together() -> bool:
        found = await machines(job.api, job)
        pairs = [(found.get(f"trainer-{rank}"), found.get(f"rollout-{rank}")) for rank in range(NODES)]
        return all(one is not None and one == other for one, other in pairs)

    await eventually(together)
    # Each of one node is replaced while the other stays, and then both at once.
    for victims in (["trainer"], ["rollout"], ["trainer", "rollout"]):
        incarnation = {"trainer": 2, "rollout": 2} if len(victims) == 1 else {"trainer": 3, "rollout": 3}
        for role in victims:
            old = request(role, incarnation=incarnation[role] - 1, job=job)
            await job.api.delete(f"{job.pods_path}/{old.name}", grace=0)
        for role in victims:
            await backend.create(request(role, incarnation=incarnation[role], job=job))
        await eventually(together)
