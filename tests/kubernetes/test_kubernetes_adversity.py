"""Tests of single faults between the backend and a real cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from perdure.activities.nodes.backend import NodeRefused
from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.activities.nodes.kubernetes.anchor import Anchors
from perdure.activities.nodes.kubernetes.watch import GroupWatch
from perdure.base.kubernetes import KubernetesApi, Object
from perdure.contract import NodeEvent, NodeEventKind
from perdure.contract.names import node_name
from scripts.cluster.cluster import Cluster
from scripts.cluster.node import Node
from tests.kubernetes.pods import PodJob, TestCluster, marking, role
from tests.support.waiting import eventually
from tests.support.watching import watching

pytestmark = pytest.mark.long("cluster-faults")

RUNNING, GONE, PENDING = NodeEventKind.RUNNING, NodeEventKind.GONE, NodeEventKind.PENDING
UNREACHABLE = "node.kubernetes.io/unreachable"


async def test_names_may_be_as_long_as_the_specification_allows(backend: KubernetesBackend, job: PodJob) -> None:
    longest = job.changed(role(resources={"cpu": 1000}), name="n" * 40)
    request = longest.request()
    node = request.node.model_copy(update={"role": "r" * 20, "rank": 999, "incarnation": 9999})
    request = request.model_copy(
        update={
            "node": node,
            "name": node_name(longest.spec.name, node),
            "spec": longest.spec.model_copy(update={"roles": {node.role: longest.spec.roles["worker"]}}),
        }
    )
    created = await backend.create(request)
    (pod,) = await longest.pods()
    assert pod["metadata"]["name"] == created.name
    assert len(created.name) <= 63
    assert len(await longest.api.list(longest.anchors_path, labels=f"perdure.dev/uid={longest.uid}")) == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ({"containers": [{"name": "perdure-agent", "image": "theirs"}]}, "a change of Perdure's own parts"),
        ({"initContainers": [{"name": "training", "image": "theirs"}]}, 'Duplicate value: "training"'),
        (
            {"volumes": [{"name": "perdure", "configMap": {"name": "theirs"}}]},
            "volumes.perdure.configMap.name: got a change of Perdure's own parts",
        ),
    ],
)
async def test_a_template_that_uses_names_of_ours_for_something_else_is_refused(
    backend: KubernetesBackend, job: PodJob, template: dict[str, Any], text: str
) -> None:
    job = job.changed(role(pod_template={"spec": template}))
    with pytest.raises(NodeRefused, match=text):
        await backend.create(job.request())
    assert await job.pods() == []


async def test_a_version_that_the_api_server_has_forgotten_hides_nothing(
    own_cluster: Cluster, backend: KubernetesBackend, cluster: TestCluster, job: PodJob
) -> None:
    """The server itself says 410, to a version from before its time; the pod that went meanwhile is reported once."""
    await asyncio.to_thread(own_cluster.kill_api_server)
    await asyncio.to_thread(own_cluster.start_api_server)
    lists: list[list[Object]] = []

    class Outdated(KubernetesApi):
        async def _request(self, method: str, path: str, **arguments: Any) -> Object:
            answer = await super()._request(method, path, **arguments)
            if answer["kind"] == "PodList":
                if not lists:
                    await job.api.delete(f"{path}/{job.name(1)}", grace=0)
                    answer["metadata"]["resourceVersion"] = "1"
                lists.append(answer["items"])
            return answer

    job = job.changed(role(resources={"cpu": 1000}))
    await asyncio.gather(backend.create(job.request(0)), backend.create(job.request(1)))
    api = await Outdated.connect(cluster.kubeconfig)
    anchors = Anchors(api)
    told: list[tuple[NodeEventKind, int]] = []
    async with asyncio.timeout(30), aclosing(GroupWatch(api, anchors, job.watch()).batches()) as batches:
        async for batch in batches:
            told += [(fact.kind, fact.rank) for fact in batch if isinstance(fact, NodeEvent)]
            if (GONE, 1) in told:
                break
    await api.close()
    assert [len(pods) for pods in lists] == [2, 1]
    assert told.count((GONE, 1)) == 1
    assert (GONE, 0) not in told


async def test_calls_wait_for_an_api_server_that_is_away(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    job = job.changed(role(resources={"cpu": 1000}))
    await backend.create(job.request(0))
    async with watching(backend, job.watch()) as watch:
        await watch.until(PENDING)
        await asyncio.to_thread(own_cluster.kill_api_server)
        calls = [
            asyncio.create_task(backend.create(job.request(1))),
            asyncio.create_task(backend.delete(job.ref(0))),
            asyncio.create_task(backend.describe(job.ref(2))),
        ]
        await asyncio.to_thread(own_cluster.start_api_server)
        for call in calls:
            # As Temporal repeats an activity whose own patience is over.
            await call
        assert [pod["metadata"]["name"] for pod in await job.pods()] == [job.name(1)]
        await watch.until(GONE, rank=0)
        await watch.until(PENDING, rank=1)


async def test_an_eviction_by_the_taint_of_an_unreachable_machine_is_told_as_one(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    at_once = [{"key": UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}]
    assert job.marks
    job = job.changed(marking(job.marks, pod_template={"spec": {"tolerations": at_once}}))
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await job.command_started()
        pod = await job.pod()
        assert pod
        # The control plane takes it away again, since the machine is there; other pods tolerate it for minutes.
        machine = f"/api/v1/nodes/{pod['spec']['nodeName']}"
        await add_taint(job.api, machine, {"key": UNREACHABLE, "effect": "NoExecute"})
        await watch.until(GONE, saying="taints")


async def test_an_eviction_for_lack_of_disk_is_told_as_one(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await job.command_started()
        pod = await job.pod()
        assert pod
        (machine,) = (node for node in own_cluster.nodes() if node.name == pod["spec"]["nodeName"])
        async with without_disk(machine, job.api):
            await watch.until(GONE, saying="its machine evicted it (Evicted: ", within=120)
        assert len([event for event in watch.events if event.kind is GONE]) == 1


async def test_a_machine_without_its_kubelet_is_no_loss_and_delays_nothing(
    own_cluster: Cluster, backend: KubernetesBackend, job: PodJob
) -> None:
    async with watching(backend, job.watch()) as watch:
        await backend.create(job.request())
        await job.command_started()
        pod = await job.pod()
        assert pod
        (machine,) = (node for node in own_cluster.nodes() if node.name == pod["spec"]["nodeName"])
        async with without_kubelet(machine, job.api):
            await watch.until(RUNNING, saying=f"{machine.name} does not answer")
            assert not [event for event in watch.events if event.kind is GONE]
            # The object stays, condemned, until the machine answers; its successor runs elsewhere.
            await asyncio.wait_for(backend.delete(job.ref()), 30)
            assert await job.pod()
            await backend.create(job.request(incarnation=2))
            await watch.until(RUNNING, incarnation=2)
            successor = await job.pod(incarnation=2)
            assert successor
            assert successor["spec"]["nodeName"] != machine.name
        await watch.until(GONE)


@asynccontextmanager
async def without_kubelet(machine: Node, api: KubernetesApi) -> AsyncIterator[None]:
    await asyncio.to_thread(machine.kill_kubelet)
    try:
        yield
    finally:
        await asyncio.to_thread(machine.start_kubelet)
        await eventually(lambda: has_condition(api, machine, "Ready", "True"))


@asynccontextmanager
async def without_disk(machine: Node, api: KubernetesApi) -> AsyncIterator[None]:
    """A machine whose kubelet finds its disk full, whatever is on it."""
    await asyncio.to_thread(machine.kill_kubelet)
    try:
        await asyncio.to_thread(lambda: machine.start_kubelet(evicts_below={"nodefs.available": "99%"}))
        yield
    finally:
        await asyncio.to_thread(machine.kill_kubelet)
        await asyncio.to_thread(machine.start_kubelet)
        await eventually(lambda: has_condition(api, machine, "DiskPressure", "False"), within=120)


async def has_condition(api: KubernetesApi, machine: Node, kind: str, status: str) -> bool:
    node = await api.get(f"/api/v1/nodes/{machine.name}")
    assert node
    return any(one["type"] == kind and one["status"] == status for one in node["status"]["conditions"])


async def add_taint(api: KubernetesApi, machine: str, taint: dict[str, Any]) -> None:
    node = await api.get(machine)
    assert node
    del node["metadata"]["resourceVersion"]
    node["spec"].setdefault("taints", []).append(taint)
    await api._request("PUT", machine, content=node)
