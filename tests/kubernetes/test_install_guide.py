"""Tests that the commands of docs/install-kubernetes.md, from the worker to a job that loses a pod, do what it says.

They run as they are printed, except where the cluster of the tests differs: it has no registry, Temporal runs
beside it, behind mutual TLS, and the job takes half a minute instead of two.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from perdure.base.errors import PerdureError
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.contract import JobPhase
from scripts.cluster.certificates import Certificates
from scripts.cluster.cluster import Cluster
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.chart import gateway_front
from tests.kubernetes.install_guide import Shell, connection_secret, differences, printed, variables
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace
from tests.kubernetes.test_chart import job_of_the_guide
from tests.support.allocation import REPOSITORY
from tests.support.fronts import tls_front
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long("cluster-faults"), pytest.mark.timeout(600)]


@pytest.fixture
async def site(cluster: TestCluster) -> AsyncIterator[PodJob]:
    """The namespace of the release, with Temporal's credentials."""
    async with job_in_a_namespace(cluster) as site:
        yield site


async def test_the_commands_of_the_guide_lead_from_a_namespace_to_a_job_that_survives_a_lost_pod(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, kubectl: Path, site: PodJob, job: PodJob, tmp_path: Path
) -> None:
    install, script, doctor, submit, delete, explain = printed()
    certificates = Certificates(tmp_path / "pki")
    certificates.create()
    await site.api.create(f"/api/v1/namespaces/{site.namespace}/secrets", connection_secret(certificates))
    for name in ("deploy", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    command = ["torchrun", "/code/train.py", "--steps", "600", "--out", "/tmp/first"]
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(job_of_the_guide(job.namespace, command=command)))
    async with (
        dev_server(options=("--namespace", "nlp")) as server,
        tls_front(server.port, address=API_ADDRESS, name="temporal-frontend", certificates=certificates) as port,
        gateway_front(site.api, site.namespace) as gateway,
    ):
        address = f"{API_ADDRESS}:{port}"
        programs = [path.parent for path in (helm, kubectl, Path(sys.executable))]
        environment = {
            **variables(certificates, address),
            "PATH": ":".join([*map(str, programs), os.environ["PATH"]]),
            "KUBECONFIG": cluster.kubeconfig,
            "HOME": str(tmp_path),
        }
        shell = Shell(tmp_path, environment, {"perdure": site.namespace, "nlp": job.namespace})
        await shell.run(install, *differences(cluster.agent_image, address, gateway, tmp_path))
        try:
            await shell.run(script)
            assert "failed" not in await shell.run(doctor)
            submitting = asyncio.create_task(shell.run(submit))
            client = Client(endpoint=Endpoint(address=server.address, namespace="nlp"), namespace=job.namespace)

            async def trains() -> bool:
                try:
                    status = await client.status("first")
                except PerdureError:
                    return submitting.done()
                return submitting.done() or status.phase is JobPhase.RUNNING

            await eventually(trains, what=lambda: f"the job trains: {submitting}")
            assert "deleted" in await shell.run(delete)
            assert "SUCCEEDED" in await submitting
            explained = await shell.run(explain)
            assert re.search(r"#1\b.*node 1", explained), explained
        finally:
            await shell.run("helm uninstall perdure --namespace perdure --wait")
