"""Tests of TrainingJobs that autoscalers scale: a HorizontalPodAutoscaler, by the real controller and an external
metric, which is also how KEDA scales."""

from __future__ import annotations

import secrets
import ssl
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from temporalio.client import Client as TemporalClient

from perdure.client.client import Client
from perdure.operator.resource import TrainingJobResource
from perdure.operator.status import Truth
from scripts.cluster.certificates import Certificates
from scripts.cluster.cluster import Cluster
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.test_deploy import kubectl_says
from tests.kubernetes.test_operator import (
    Operator,
    Resources,
    address_of,
    is_running,
    local_nodes,
    resources,
    sleeping,
)

__all__ = ["local_nodes", "resources"]

GROUP = "external.metrics.k8s.io"
VERSION = f"/apis/{GROUP}/v1beta1"
REGISTRATIONS = "/apis/apiregistration.k8s.io/v1/apiservices"


class Queue:
    """A length that autoscalers read."""

    length = 10


@pytest.fixture
async def queue(own_cluster: Cluster, resources: Resources) -> AsyncIterator[Queue]:
    """The metric `queue`, served as the servers of monitoring systems, and KEDA's, serve theirs."""
    known = Queue()

    async def kinds(_: web.Request) -> web.Response:
        kind = {"name": "queue", "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList"}
        listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/v1beta1"}
        return web.json_response({**listed, "resources": [{**kind, "verbs": ["get"]}]})

    async def value(_: web.Request) -> web.Response:
        item = {"metricName": "queue", "metricLabels": {}, "timestamp": "2026-01-01T00:00:00Z"}
        listed = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/v1beta1", "metadata": {}}
        return web.json_response({**listed, "items": [{**item, "value": str(known.length)}]})

    app = web.Application()
    app.router.add_get(VERSION, kinds)
    app.router.add_get(f"{VERSION}/namespaces/{{namespace}}/queue", value)
    runner = web.AppRunner(app)
    await runner.setup()
    with tempfile.TemporaryDirectory() as folder:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificates = Certificates(Path(folder) / "pki")
        certificates.create()
        context.load_cert_chain(*certificates.issue("metrics", user="metrics", hosts=[f"IP:{API_ADDRESS}"]))
        site = web.TCPSite(runner, API_ADDRESS, 0, ssl_context=context)
        await site.start()
    port = runner.addresses[0][1]
    service = f"metrics-{secrets.token_hex(4)}"
    await resources.api.create(
        f"/api/v1/namespaces/{resources.namespace}/services",
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": service},
            "spec": {"type": "ExternalName", "externalName": API_ADDRESS},
        },
    )
    await resources.api.create(
        REGISTRATIONS,
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"v1beta1.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": "v1beta1",
                "insecureSkipTLSVerify": True,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "service": {"namespace": resources.namespace, "name": service, "port": port},
            },
        },
    )
    yield known
    # A registration without its server would keep the API server from deleting namespaces.
    await resources.api.delete(f"{REGISTRATIONS}/v1beta1.{GROUP}")
    await runner.cleanup()


def autoscaler(most: int) -> dict[str, Any]:
    """One node for each 10 of the queue."""
    target = {"type": "AverageValue", "averageValue": "10"}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "job"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "perdure.dev/v1alpha1", "kind": "TrainingJob", "name": "job"},
            "minReplicas": 1,
            "maxReplicas": most,
            "metrics": [{"type": "External", "external": {"metric": {"name": "queue"}, "target": target}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }


def told(known: TrainingJobResource) -> str:
    """What the object says of its acceptance."""
    condition = known.status.condition("Accepted")
    assert condition is not None
    assert condition.status is Truth.TRUE
    return condition.message


@pytest.mark.long("cluster-faults")
@pytest.mark.timeout(420)
async def test_a_horizontal_pod_autoscaler_scales_a_job_within_the_nodes_that_its_user_states(
    own_cluster: Cluster,
    kubectl: Path,
    resources: Resources,
    queue: Queue,
    temporal_client: TemporalClient,
    local_nodes: None,
    tmp_path: Path,
) -> None:
    address, log = address_of(temporal_client), tmp_path / "operator.log"
    client = Client(address=address, namespace=resources.namespace)
    async with Operator(own_cluster.kubeconfig, resources.namespace, address, log, options=("--owners", "ignore")):
        await resources.apply("job", {**sleeping(nodes="1:3"), "replicas": 1})
        await resources.until("job", is_running("1/1"))
        path = f"/apis/autoscaling/v2/namespaces/{resources.namespace}/horizontalpodautoscalers"
        await resources.api.create(path, autoscaler(5))
        queue.length = 20
        known = await resources.until("job", is_running("2/2"))
        assert (known.spec["replicas"], known.autoscaler) == (2, "kube-controller-manager")

        queue.length = 50
        known = await resources.until("job", is_running("3/3"))
        known = await resources.until("job", lambda known: known.spec["replicas"] == 5 and "asks" in told(known))
        assert (
            "replicas: kube-controller-manager asks for 5 nodes, and nodes of role worker is 1:3: the job has 3"
            in told(known)
        )

        # The user's word counts more, whatever the autoscaler asks for, and where it does not, the answer says so.
        await resources.patch("job", {"roles": {"worker": {"nodes": "1:2"}}})
        await resources.until("job", is_running("2/2"))
        answer = await client.scale("job", 1)
        assert "its TrainingJob object decides" in answer.message
        await resources.until("job", is_running("2/2"))

        queue.length = 10
        await resources.until("job", is_running("1/1"))
        await kubectl_says(
            kubectl,
            *("-n", resources.namespace, "patch", "tj/job", "--type", "merge"),
            *("-p", '{"spec": {"roles": {"worker": {"nodes": 2}}}}'),
            kubeconfig=str(own_cluster.kubeconfig),
        )
        known = await resources.until("job", is_running("2/2"))
        assert "asks for 1 node, and nodes of role worker is 2: the job has 2" in told(known)
        await resources.api.delete(f"{path}/job")
        await resources.delete("job")
        await resources.until_gone("job")
