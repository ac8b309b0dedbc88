"""Tests that the commands of docs/install-kubernetes.md, from the worker to a job that loses a pod, do what it says.

They run as they are printed, except where the cluster of the tests differs: it has no registry, Temporal runs
beside it, behind mutual TLS, and the job takes half a minute instead of two.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import yaml

from perdure.base.errors import PerdureError
from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.contract import JobPhase
from scripts.cluster.certificates import Certificates
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY
from scripts.cluster.machine import API_ADDRESS
from tests.docs.commands import typed_lines
from tests.docs.pages import PAGES
from tests.kubernetes.chart import gateway_front
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace
from tests.kubernetes.test_chart import connection_secret, job_of_the_guide
from tests.support.allocation import REPOSITORY
from tests.support.fronts import tls_front
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually

pytestmark = [pytest.mark.long("cluster-faults"), pytest.mark.timeout(600)]

[GUIDE] = [page for page in PAGES if page.name == "docs/install-kubernetes.md"]
ELSEWHERE = re.compile(r"kubectl create namespace|kubectl port-forward|export ")
"""Commands for which something else stands: the test has made its namespaces, Temporal is no Service here, and the
test sets the variables of commands."""


def printed() -> list[str]:
    """The commands of the guide's steps 3 and 4, in order."""
    lines = [text for block in GUIDE.blocks for _, text in typed_lines(block)]
    first = lines.index("kubectl create namespace nlp")
    last = next(index for index, text in enumerate(lines) if text.startswith("perdure explain"))
    return [text for text in lines[first : last + 1] if not ELSEWHERE.match(text)]


class Shell:
    """Runs printed commands with the names of the test's namespaces."""

    def __init__(self, folder: Path, environment: Mapping[str, str], names: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment
        self._names = names

    async def run(self, text: str, *more: str) -> str:
        for word, name in self._names.items():
            text = re.sub(rf"(--namespace |jobNamespaces='\{{){word}\b", rf"\g<1>{name}", text)
        words = [*shlex.split(text), *more]
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=self._folder,
            env=self._environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, f"{shlex.join(words)}:\n{out.decode()}"
        return out.decode()


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
        await shell.run(install, *differences(cluster, address, gateway, tmp_path))
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


def variables(certificates: Certificates, address: str) -> dict[str, str]:
    certificate, key = certificates.issue("user", user="user")
    return {
        "TEMPORAL_ADDRESS": address,
        "TEMPORAL_NAMESPACE": "nlp",
        "TEMPORAL_TLS_SERVER_NAME": "temporal-frontend",
        "TEMPORAL_TLS_SERVER_CA_CERT_PATH": str(certificates.authority),
        "TEMPORAL_TLS_CLIENT_CERT_PATH": str(certificate),
        "TEMPORAL_TLS_CLIENT_KEY_PATH": str(key),
    }


def differences(cluster: TestCluster, address: str, gateway: str, folder: Path) -> list[str]:
    """Options of `helm install` for what the machine's own cluster has not: a registry, Services, and CPU to spare."""
    small = {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
    repository, _, tag = cluster.agent_image.rpartition(":")
    values = {
        "image": {"tag": tag, "pullPolicy": "Never"},
        "temporal": {"address": address},
        "gateway": {"address": gateway, **small},
        **small,
        "sitePolicy": yaml.safe_load(SITE_POLICY),
    }
    path = folder / "differences.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["--values", str(path), "--set", f"image.repository={repository}", "--timeout", "3m"]
