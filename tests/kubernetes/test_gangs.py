"""Tests of gangs on a real cluster: objects fit the schedulers' schemas, and a job tolerates Kueue's actions.

Kueue itself cannot run here. `PlayedKueue` does to pods what Kueue does; its webhook's part is in `pod_template`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.activities.nodes.backend import NodeNotYet, NodeRefused
from perdure.activities.nodes.kubernetes.gangs import adapter_of
from perdure.activities.nodes.kubernetes.site_policy import ORDINARY_FIELDS, SitePolicy
from perdure.base.kubernetes_errors import KubernetesError
from perdure.contract import FailureClass, JobPhase, NodeEventKind, NodePhase
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually
from tests.support.watching import watching

pytestmark = pytest.mark.long("cluster-faults")

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
FINALIZER = "kueue.x-k8s.io/managed"
ADMITTED_LATER: dict[str, Any] = {
    "metadata": {"finalizers": [FINALIZER], "labels": {FINALIZER: "true"}},
    "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
}
"""The fields that Kueue's webhook adds to a pod with a queue."""
POLICY = SitePolicy.parse(SITE_POLICY).model_copy(
    update={
        "template_fields": (*ORDINARY_FIELDS, "metadata.finalizers", "spec.schedulingGates"),
        "labels": (FINALIZER,),
    }
)
"""Lets a job's own template play that webhook's part, which comes after the worker's check."""

SAVES_WHEN_ASKED_TO_END = """
import os, pathlib, signal, sys, time

folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]


def save(*_):
    time.sleep(1)
    (folder / f"saved-{os.environ['PERDURE_GENERATION']}-{rank}").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
(folder / f"ready-{os.environ['PERDURE_GENERATION']}-{rank}").touch()
while True:
    signal.pause()
"""


class PlayedKueue:
    """Simulates Kueue's actions on the pods of a job."""

    def __init__(self, job: PodJob) -> None:
        self._api = job.api
        self._path = job.pods_path

    async def admit(self, pod: str) -> None:
        await self._api.patch(f"{self._path}/{pod}", {"spec": {"schedulingGates": None}})

    async def preempt(self, pod: str) -> None:
        message = "Preempted to accommodate a workload due to prioritization in the ClusterQueue"
        sentence = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted", "message": message}
        await self._api.patch(f"{self._path}/{pod}/status", {"status": {"conditions": [sentence]}}, strategic=True)
        await self._api.delete(f"{self._path}/{pod}")

    async def release(self, pod: str) -> None:
        content = {"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}}
        await self._api.patch(f"{self._path}/{pod}", content, strategic=True)


@pytest.fixture
async def kueue(job: PodJob) -> AsyncIterator[PlayedKueue]:
    played = PlayedKueue(job)
    yield played
    for pod in await job.pods():
        await played.release(pod["metadata"]["name"])


@asynccontextmanager
async def definition(job: PodJob, file: str) -> AsyncIterator[None]:
    """A custom resource that the API server knows for as long as the context is open."""
    content = yaml.safe_load((Path(__file__).parent / "crds" / file).read_text())
    name = f"{DEFINITIONS}/{content['metadata']['name']}"
    served, plural = content["spec"]["versions"][0]["name"], content["spec"]["names"]["plural"]
    await job.api.create(DEFINITIONS, content)
    try:

        async def known() -> bool:
            try:
                await job.api.list(f"/apis/{content['spec']['group']}/{served}/namespaces/{job.namespace}/{plural}")
            except KubernetesError:
                return False
            return True

        await eventually(known)
        yield
    finally:
        await job.api.delete(name)
        await eventually(lambda: absent(job, name))


async def absent(job: PodJob, path: str) -> bool:
    return await job.api.get(path) is None


@pytest.mark.parametrize(
    ("system", "group", "topology"),
    [
        ("volcano", "scheduling.volcano.sh/v1beta1", {"required": "2"}),
        ("coscheduling", "scheduling.x-k8s.io/v1alpha1", None),
    ],
)
async def test_the_real_schemas_take_a_job_s_group_whole(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, system: str, group: str, topology: dict[str, str] | None
) -> None:
    backend = cluster.backend(gangs=system)
    given = role(nodes={"min": 2, "max": 4}, resources={"cpu": "100m", "memory": "64Mi"}, topology=topology)
    job = job.changed(given, queue="research")
    with pytest.raises(NodeRefused, match=f"knows no PodGroup of {group}"):
        await backend.create(job.request())
    async with definition(job, f"{system}-podgroups.yaml"):
        # The server is asked to refuse what it would prune.
        await asyncio.gather(*(backend.create(job.request(rank)) for rank in range(4)))
        path = f"/apis/{group}/namespaces/{job.namespace}/podgroups"
        (made,) = await job.api.list(path)
        assert made["spec"]["minMember"] == 2
        assert made["spec"]["minResources"] == {"cpu": "0.300", "memory": str(2 * (64 + 128) * 1024**2)}
        assert made["spec"].get("networkTopology") == (topology and {"mode": "hard", "highestTierAllowed": 2})
        assert made["metadata"]["ownerReferences"][0]["name"] == f"perdure-made-up-{job.uid}"
        # A job that is scaled below its minimum must not wait for members that never come.
        await backend.create(job.request(1, incarnation=2).model_copy(update={"nodes_min": 1}))
        (changed,) = await job.api.list(path)
        assert changed["spec"]["minMember"] == 1
        assert changed["metadata"]["uid"] == made["metadata"]["uid"]
    await backend.close()


async def test_kubernetes_own_scheduler_binds_no_node_before_there_are_enough(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob
) -> None:
    gangs, one_by_one = cluster.backend(gangs="workload"), cluster.backend()
    other, job = job.changed(role()), job.changed(role(nodes={"min": 2, "max": 3}))
    async with watching(gangs, job.watch()) as watch, watching(one_by_one, other.watch()) as others:
        await gangs.create(job.request(0))
        await one_by_one.create(other.request())
        # What the scheduler saw later runs by now.
        await others.until(NodeEventKind.RUNNING)
        assert "nodeName" not in ((await job.pod(0)) or {})["spec"]
        await gangs.create(job.request(2))
        for rank in (0, 2):
            await watch.until(NodeEventKind.RUNNING, rank=rank)
        await gangs.create(job.request(1))
        await watch.until(NodeEventKind.RUNNING, rank=1)
    await asyncio.gather(gangs.close(), one_by_one.close())


async def test_the_elastic_part_comes_after_the_base_and_goes_without_it(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, kueue: PlayedKueue, tmp_path: Path
) -> None:
    backend = cluster.backend(gangs="kueue", policy=POLICY)
    given = role(
        tmp_path,
        nodes={"min": 2, "max": 4, "unit": 2},
        command=["sh", "-c", f"touch {tmp_path}/$HOSTNAME; exec sleep 600"],
        pod_template=ADMITTED_LATER,
    )
    job = job.changed(given, queue="research")
    async with watching(backend, job.watch()) as watch:
        await asyncio.gather(backend.create(job.request(0)), backend.create(job.request(1)))
        await watch.until(NodeEventKind.PENDING, saying="its queue has not admitted it (SchedulingGated")
        with pytest.raises(NodeNotYet, match="queue research has not admitted the job's first 2 nodes"):
            await backend.create(job.request(2))
        await asyncio.gather(kueue.admit(job.name(0)), kueue.admit(job.name(1)))
        await asyncio.gather(backend.create(job.request(2)), backend.create(job.request(3)))
        await asyncio.gather(kueue.admit(job.name(2)), kueue.admit(job.name(3)))
        await asyncio.gather(job.command_started(2), job.command_started(3))

        await asyncio.gather(kueue.preempt(job.name(2)), kueue.preempt(job.name(3)))
        for rank in (2, 3):
            await watch.until(NodeEventKind.GONE, rank=rank, saying="has evicted it (WorkloadEvicted: Preempted")
        assert {event.rank for event in watch.events if event.kind is NodeEventKind.GONE} == {2, 3}

        # What Kueue holds of one is its place in the group, for a replacement; for the other it is not needed.
        await asyncio.gather(backend.delete(job.ref(2, replaced=True)), backend.delete(job.ref(3)))
        await eventually(lambda: absent(job, f"{job.pods_path}/{job.name(3)}"))
        assert await job.pod(2) is not None
        await backend.create(job.request(2, incarnation=2))
        # When that is given up as well, nothing is left: it had no machine, and is gone as soon as it is deleted.
        await backend.delete(job.ref(2, incarnation=2))
        await watch.until(NodeEventKind.GONE, rank=2, incarnation=2)
        for incarnation in (1, 2):
            await eventually(lambda: absent(job, f"{job.pods_path}/{job.name(2, incarnation)}"))  # noqa: B023
    await backend.close()


async def test_a_job_whose_elastic_part_is_preempted_saves_and_goes_on_smaller(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, kueue: PlayedKueue
) -> None:
    with tempfile.TemporaryDirectory(prefix="perdure-results-") as folder:
        results = Path(folder)
        script = results / "train.py"
        script.write_text(SAVES_WHEN_ASKED_TO_END)
        async with perdure(cluster, job.namespace, gangs=adapter_of("kueue"), policy=POLICY) as (_, client):
            given = role(
                results,
                nodes="1:2",
                rendezvous="env",
                command=[sys.executable, str(script), str(results)],
                pod_template=ADMITTED_LATER,
            )
            training = await start(
                client,
                given,
                results,
                queue="research",
                limits={"termination_grace_period": "10s"},
                timing={"rendezvous": {"last_call": "1s"}},
            )
            name = training.name
            base = await gated_pod(job, rank=0, incarnation=1)
            assert len(await job.pods()) == 1
            await kueue.admit(base)
            await training.running(nodes=1)
            await kueue.admit(await gated_pod(job, rank=1, incarnation=1))
            known = await training.running(nodes=2)
            await eventually(lambda: exists(results / f"ready-{known.generation}-1"))

            (elastic,) = [pod for pod in await names(job) if "-worker-1-" in pod]
            await kueue.preempt(elastic)
            smaller = await training.running(nodes=1, after=known.generation)
            assert await exists(results / f"saved-{known.generation}-1")
            (incident,) = [one for one in await training.incidents() if one.failure]
            assert (incident.failure, incident.culprit) == (FailureClass.DISRUPTED, 1)
            assert any("its queue has evicted it" in sign.text for sign in incident.evidence)

            # Its replacement waits in the queue, and the job grows again when that admits it.
            replacement = await gated_pod(job, rank=1, incarnation=2)
            await kueue.release(elastic)
            (waiting,) = [node for node in await client.nodes(name) if node.rank == 1]
            assert waiting.phase in (NodePhase.REQUESTED, NodePhase.CREATED, NodePhase.PENDING)
            await kueue.admit(replacement)
            await training.running(nodes=2, after=smaller.generation)

            await client.cancel(name)
            assert (await client.wait(name)).phase is JobPhase.CANCELLED
            await eventually(job.nothing_left)


async def names(job: PodJob) -> list[str]:
    return [pod["metadata"]["name"] for pod in await job.pods()]


async def gated_pod(job: PodJob, *, rank: int, incarnation: int) -> str:
    """The name of a node's pod, once it is there and waits for its queue."""

    async def found() -> str:
        for pod in await job.pods():
            labels = pod["metadata"]["labels"]
            of = (labels["perdure.dev/rank"], labels["perdure.dev/incarnation"])
            if of == (str(rank), str(incarnation)) and pod["spec"].get("schedulingGates"):
                return pod["metadata"]["name"]
        return ""

    return await eventually(found)


async def exists(path: Path) -> bool:
    return path.exists()
