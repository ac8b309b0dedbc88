"""Tests of the example of a plain Job on real nodes: the cluster creates and replaces its pods, which join by
themselves."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.activities.nodes.joined.backend import JoinedBackend
from perdure.activities.nodes.kubernetes.merge import merge
from perdure.client.client import Client
from perdure.contract import JobPhase
from perdure.worker import running_worker
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from scripts.cluster.machine import API_ADDRESS
from tests.kubernetes.pods import PodJob
from tests.support.allocation import REPOSITORY
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.system.site import SCRIPT, Job

pytestmark = pytest.mark.long("joining")

EXAMPLE = REPOSITORY / "examples" / "06-kubernetes-job" / "job.yaml"


async def test_a_pod_that_the_cluster_replaces_has_its_place_back(own_cluster: Cluster, job: PodJob) -> None:
    name = f"joined-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix="perdure-results-") as folder:
        results = Path(folder)
        async with dev_server(options=("--ip", "0.0.0.0")) as server:
            temporal = await server.client()
            async with running_worker(temporal, backends=[JoinedBackend()]):
                client = Client(temporal=temporal)
                await job.api.create(
                    f"/apis/batch/v1/namespaces/{job.namespace}/jobs",
                    example(name, results, temporal=f"{API_ADDRESS}:{server.port}"),
                )
                await eventually(lambda: exists(client, name))
                training = Job(client, name, (await client.status(name)).uid, results)
                known = await training.running(nodes=2)
                await training.stepping(generation=known.generation, ranks=2)
                addresses = {node.address for node in await client.nodes(name)}
                pods = await job.pods()
                assert addresses == {pod["status"]["podIP"] for pod in pods}

                (victim,) = (pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"].startswith(f"{name}-1"))
                await job.api.delete(f"{job.pods_path}/{victim}")
                known = await training.running(nodes=2, after=1)
                await training.stepping(generation=known.generation, ranks=2)
                assert sorted((node.rank, node.incarnation) for node in await client.nodes(name)) == [(0, 1), (1, 2)]
                signs = [sign.text for sign in (await training.incidents())[0].evidence]
                assert any("`perdure join` on" in sign and "got SIGTERM" in sign for sign in signs), signs

                await client.cancel(name)
                assert (await client.wait(name)).phase is JobPhase.CANCELLED
        await job.api.delete(f"/apis/batch/v1/namespaces/{job.namespace}/jobs/{name}")


async def exists(client: Client, name: str) -> bool:
    return any(known.name == name for known in await client.list())


def example(name: str, results: Path, *, temporal: str) -> dict[str, Any]:
    """The example, smaller, and with this machine's programs and the tests' training."""
    manifest: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    manifest["metadata"]["name"] = name
    manifest["spec"] |= {"completions": 2, "parallelism": 2}
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = BARE_IMAGE
    options = container["command"][3 : container["command"].index("--") + 1]
    options[options.index("--nodes") + 1] = "2"
    container["command"] = ["perdure", "join", name, *options, "torchrun", str(SCRIPT), str(results)]
    for variable in container["env"]:
        if variable["name"] == "TEMPORAL_ADDRESS":
            variable["value"] = temporal
    container["env"] += [
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "PERDURE_STATE", "value": str(results / "state")},
    ]
    manifest["spec"]["template"] = merge(manifest["spec"]["template"], with_host_programs(results))
    return manifest
