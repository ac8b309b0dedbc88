"""Tests of upgrading an earlier release's chart to this one while jobs train: two workers are replaced by two
others."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.client.client import Client
from perdure.client.connection import Endpoint
from perdure.contract import FailureClass, JobPhase
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import SITE_POLICY, with_host_programs
from scripts.cluster.images import BARE_IMAGE
from scripts.cluster.machine import API_ADDRESS
from tests.docs.commands import COMMANDS
from tests.kubernetes.chart import CHART, HelmFailed, Release, gateway_front, helm_says
from tests.kubernetes.pods import PodJob, TestCluster, job_in_a_namespace
from tests.support.allocation import REPOSITORY
from tests.support.releases import EARLIER, FROZEN, checked_out
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually
from tests.system.site import SCRIPT, Job

TASK_QUEUE = "upgraded"


def values(image: str, address: str, gateway: str, namespace: str) -> dict[str, Any]:
    repository, _, tag = image.rpartition(":")
    small = {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "temporal": {"address": address, "taskQueue": TASK_QUEUE},
        "gateway": {"address": gateway, **small},
        "jobNamespaces": [namespace],
        "sitePolicy": yaml.safe_load(SITE_POLICY),
        **small,
    }


@pytest.mark.parametrize("release", FROZEN)
async def test_defaults_of_an_earlier_chart_are_refused_with_the_option_that_takes_new_ones(
    helm: Path, tmp_path: Path, release: str
) -> None:
    """As `helm upgrade --reuse-values` passes them."""
    earlier = checked_out(release, tmp_path) / CHART.relative_to(REPOSITORY)
    mixed = tmp_path / "mixed"
    shutil.copytree(CHART, mixed)
    shutil.copy(earlier / "values.yaml", mixed / "values.yaml")
    with pytest.raises(HelmFailed, match="use --reset-then-reuse-values instead of --reuse-values"):
        await helm_says(helm, "template", "perdure", mixed)


UPGRADES = [one for one in COMMANDS if one.words[:2] == ("helm", "upgrade") and "deploy/helm/perdure" in one.words]


def test_the_docs_print_no_upgrade_that_takes_earlier_defaults() -> None:
    assert UPGRADES
    assert all("--reset-then-reuse-values" in one.words and "--reuse-values" not in one.words for one in UPGRADES)


@pytest.mark.long("cluster-faults")
@pytest.mark.parametrize("release", EARLIER | FROZEN)
async def test_a_job_trains_on_through_the_upgrade_and_is_repaired_during_and_after_it(
    own_cluster: Cluster, cluster: TestCluster, helm: Path, job: PodJob, results: Path, tmp_path: Path, release: str
) -> None:
    earlier = checked_out(release, tmp_path)
    image = (await asyncio.to_thread(own_cluster.load_perdure_image, earlier)).reference
    async with (
        job_in_a_namespace(cluster) as site,
        dev_server(options=("--ip", "0.0.0.0")) as server,
        gateway_front(job.api, site.namespace) as gateway,
    ):
        address = f"{API_ADDRESS}:{server.port}"
        client = Client(
            endpoint=Endpoint(address=server.address, task_queue=TASK_QUEUE),
            namespace=job.namespace,
        )
        async with Release(helm, cluster.kubeconfig, site.namespace) as installed:
            chart = earlier / CHART.relative_to(REPOSITORY)
            await installed.apply(values(image, address, gateway, job.namespace), chart=chart)
            name = f"u-{secrets.token_hex(4)}"
            await client.submit(training_job(name, job.namespace, results))
            training = Job(client, name, (await client.status(name)).uid, results)
            before = await training.running(nodes=2)
            await training.stepping(generation=before.generation, ranks=2)

            [printed] = [one.words for one in UPGRADES if one.page == "docs/install-kubernetes.md"]
            tag = cluster.agent_image.rpartition(":")[2]
            upgrade = asyncio.create_task(installed.run(printed, "--set", f"image.tag={tag}"))
            training.signal(0, "rank")
            repaired = await training.running(nodes=2, after=before.generation)
            await upgrade
            await training.undisturbed(ranks=2, seconds=2)
            [victim] = [pod["metadata"]["name"] for pod in await job.pods() if "-worker-1-" in pod["metadata"]["name"]]
            await job.api.delete(f"{job.pods_path}/{victim}")
            replaced = await training.running(nodes=2, after=repaired.generation)
            await training.stepping(generation=replaced.generation, ranks=2)

            assert [incident.culprit for incident in await training.incidents()][:2] == [0, 1]
            assert (await training.incidents())[1].failure is FailureClass.DISRUPTED
            assert sorted((node.rank, node.incarnation) for node in await client.nodes(name)) == [(0, 1), (1, 2)]
            assert await client.task_failures(name) == ()
            await client.cancel(name)
            assert (await client.wait(name)).phase is JobPhase.CANCELLED
            await eventually(job.nothing_left)


def training_job(name: str, namespace: str, results: Path) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": namespace,
        "backend": "kubernetes",
        "env": {"OMP_NUM_THREADS": "1"},
        "limits": {"termination_grace_period": "5s"},
        "roles": {
            "worker": {
                "nodes": 2,
                "image": BARE_IMAGE,
                "command": ["torchrun", str(SCRIPT), str(results)],
                "pod_template": with_host_programs(results),
            }
        },
    }
