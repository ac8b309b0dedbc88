"""Tests of a cluster that renews the authority of its API server, as clusters do before it expires."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from perdure.base.kubernetes import TRANSIENT
from perdure.contract import NodeEventKind
from scripts.cluster.certificates import Certificates
from scripts.cluster.cluster import Cluster
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.support.waiting import eventually
from tests.support.watching import watching


@asynccontextmanager
async def served_by(authority: Certificates, cluster: Cluster) -> AsyncIterator[None]:
    """The API server shows a certificate of another authority, and knows its clients by the former one."""
    issued = authority.issue("apiserver", user="kube-apiserver", hosts=[f"IP:{API_ADDRESS}"])
    files = [cluster.certificates.authority.with_name(path.name) for path in issued]
    former = [path.read_bytes() for path in files]

    async def replace(contents: list[bytes]) -> None:
        await asyncio.to_thread(cluster.kill_api_server)
        for path, content in zip(files, contents, strict=True):
            path.write_bytes(content)

    await replace([path.read_bytes() for path in issued])
    try:
        await asyncio.to_thread(cluster.start_api_server, awaited=False)
        yield
    finally:
        await replace(former)
        await asyncio.to_thread(cluster.start_api_server)


async def test_a_worker_follows_its_kubeconfig_to_a_renewed_authority(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    content = json.loads(Path(cluster.kubeconfig).read_text())
    kubeconfig.write_text(json.dumps(content))
    renewed = Certificates(tmp_path / "pki")
    renewed.create()
    waiting = job.changed(role(resources={"cpu": 1000}))
    worker = cluster.backend(kubeconfig=kubeconfig)
    async with watching(worker, waiting.watch()) as watch:
        await worker.create(waiting.request())
        await watch.until(NodeEventKind.PENDING)
        async with served_by(renewed, own_cluster):
            (entry,) = content["clusters"]
            entry["cluster"]["certificate-authority-data"] = base64.b64encode(renewed.authority.read_bytes()).decode()
            kubeconfig.write_text(json.dumps(content))

            async def deleted() -> bool:
                # Temporal repeats an activity whose own patience is over.
                with suppress(*TRANSIENT):
                    await worker.delete(waiting.ref(winding_down=True))
                    return True
                return False

            await eventually(deleted, within=120)
            await watch.until(NodeEventKind.GONE)
    await worker.close()
