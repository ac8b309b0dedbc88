"""The site of the day: a release in the machine's own cluster, installed as docs/install-kubernetes.md prints it.

Worker, gateways and operator are pods of the cluster whose faults the day consists of, as they are for users. Temporal
runs beside the cluster, behind mutual TLS.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kubernetes.site import BenchmarkApi, eventually
from perdure.base.kubernetes import Object
from perdure.client.connection import Endpoint
from scripts.cluster.binaries import HELM_SOURCE, KUBECTL_SOURCE, ensure
from scripts.cluster.certificates import Certificates
from scripts.cluster.cluster import Cluster
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.chart import gateway_front
from tests.kubernetes.install_guide import Shell, connection_secret, differences, printed
from tests.support.fronts import tls_front
from tests.support.temporal_server import dev_server

ROOT = Path(__file__).parents[2]
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingjobs.perdure.dev"

SERVE_SECONDS = 180.0
"""Longest time for the release's pods to serve again: a machine under pressure gives its taint up late."""


@dataclass(frozen=True)
class Site:
    """A cluster with a release, and a namespace for the job of each event."""

    cluster: Cluster
    api: BenchmarkApi
    shell: Shell
    """Runs helm and kubectl as an administrator."""
    endpoint: Endpoint
    namespace: str
    """The release's own."""
    job_namespaces: tuple[str, ...]

    async def serves(self) -> None:
        """Waits until every Deployment of the release has all its pods.

        Raises:
            TrialFailed: if one has not in time.
        """

        async def complete() -> bool:
            found = await self.api.list(f"/apis/apps/v1/namespaces/{self.namespace}/deployments")
            return bool(found) and all(_is_complete(deployment) for deployment in found)

        await eventually(complete, seconds=SERVE_SECONDS, otherwise="the release does not serve", pause=0.5)


@asynccontextmanager
async def site(report: Callable[[str], None], *, jobs: int) -> AsyncGenerator[Site]:
    """Provides the site, and removes it when the context closes, except for a cluster that ran before.

    Args:
        report: receives progress messages.
        jobs: how many namespaces for jobs the release serves.
    """
    programs = ensure(report, (HELM_SOURCE, KUBECTL_SOURCE))
    with Cluster().use(report) as cluster, tempfile.TemporaryDirectory(prefix="po-") as name:
        folder = Path(name)
        image = cluster.load_perdure_image().reference
        certificates = Certificates(folder / "pki")
        certificates.create()
        own = f"oncall-{secrets.token_hex(3)}"
        job_namespaces = tuple(f"{own}-{number}" for number in range(1, jobs + 1))
        (folder / "deploy").symlink_to(ROOT / "deploy")
        paths = [str(program.parent) for program in programs.values()]
        environment = {
            "PATH": ":".join([*paths, os.environ["PATH"]]),
            "KUBECONFIG": str(cluster.kubeconfig),
            "HOME": name,
        }
        shell = Shell(folder, environment, {"perdure": own, "nlp": ",".join(job_namespaces)})
        async with AsyncExitStack() as ends:
            api = await BenchmarkApi.connect(str(cluster.kubeconfig))
            ends.push_async_callback(api.close)
            for namespace in (own, *job_namespaces):
                content = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
                await api.create("/api/v1/namespaces", content)
                ends.push_async_callback(api.delete, f"/api/v1/namespaces/{namespace}")
            await api.create(f"/api/v1/namespaces/{own}/secrets", connection_secret(certificates))
            server = await ends.enter_async_context(dev_server(options=("--namespace", "nlp")))
            front = tls_front(server.port, address=API_ADDRESS, name="temporal-frontend", certificates=certificates)
            temporal = f"{API_ADDRESS}:{await ends.enter_async_context(front)}"
            gateway = await ends.enter_async_context(gateway_front(api, own))
            if await api.get(DEFINITION) is None:
                # Helm installs it with the first release, and never removes it.
                ends.push_async_callback(api.delete, DEFINITION)
            install, *_ = printed()
            ends.push_async_callback(shell.run, "helm uninstall perdure --namespace perdure --ignore-not-found --wait")
            report(f"Installing the release: {install} --set operator.enabled=true")
            options = differences(image, temporal, gateway, folder)
            await shell.run(install, "--set", "operator.enabled=true", *options)
            endpoint = Endpoint(address=server.address, namespace="nlp")
            yield Site(cluster, api, shell, endpoint, own, job_namespaces)


def _is_complete(deployment: Object) -> bool:
    status, wanted = deployment.get("status", {}), deployment["spec"]["replicas"]
    current = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return current and status.get("availableReplicas", 0) == wanted == status.get("replicas", 0)
