"""Tests of a job that fits no machine: it waits with the scheduler's message, for the configured time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perdure.contract import JobPhase, NodePhase
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start

pytestmark = pytest.mark.long("cluster-faults")


async def test_a_job_waits_for_machines_until_its_queue_timeout(
    cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        waiting = await start(
            client,
            role(nodes=2, resources={"cpu": 1000}),
            tmp_path,
            # Shorter than the wait for a node that has a machine, which is not what is waited for here.
            limits={"queue_timeout": "5s"},
            timing={"rendezvous": {"join_timeout": "5m"}},
        )
        status = await waiting.until(lambda known: known.phase is JobPhase.WAITING)
        # Whichever of the two nodes the scheduler has spoken of first.
        assert re.match(
            r"0 of at least 2 nodes are ready; node [01]: no machine can take it \(Unschedulable: ", status.reason
        )
        assert "Insufficient cpu" in status.reason
        assert status.reason.endswith("(limits.queue_timeout)")
        result = await client.wait(waiting.name)
        assert (result.phase, result.exit_code) == (JobPhase.FAILED, 3)
        assert re.search(
            r"0 nodes were ready after 5s \(limits.queue_timeout\), and nodes.min is 2; node [01]: no", result.reason
        )


async def test_a_job_whose_secret_is_missing_reports_it_until_a_user_makes_it(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        waiting = await start(client, role(), tmp_path, secrets={"TOKEN": "wandb/token"})
        missing = "training: a secret or configuration that it needs is missing"
        # The agent's container has started by then.
        await waiting.until(lambda known: missing in known.next_action)
        [view] = await client.nodes(waiting.name)
        assert (view.phase, view.reason.startswith(missing)) == (NodePhase.PENDING, True)
        assert missing in (await client.status(waiting.name)).reason
        secret = {"metadata": {"name": "wandb"}, "stringData": {"token": "x"}}
        await job.api.create(f"/api/v1/namespaces/{job.namespace}/secrets", secret)
        await waiting.until(lambda known: "joined" in known.next_action)


async def test_a_job_whose_image_is_missing_ends_with_that_reason(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    async with perdure(cluster, job.namespace) as (_, client):
        never = role(image="localhost/perdure/none:1", image_pull_policy="Never")
        waiting = await start(client, never, tmp_path, timing={"rendezvous": {"join_timeout": "30s"}})
        result = await client.wait(waiting.name)
        assert "node 0: training: its image is not on its machine" in result.reason
        refused = await start(client, role(image="Not/An:Image:Name"), tmp_path)
        result = await client.wait(refused.name)
        assert "training: its image's name is invalid" in result.reason


async def test_a_job_says_which_quota_it_waits_for(cluster: TestCluster, job: PodJob, tmp_path: Path) -> None:
    await job.allow_no_pods()
    async with perdure(cluster, job.namespace) as (_, client):
        waiting = await start(client, role(), tmp_path, limits={"queue_timeout": "5s"})
        result = await client.wait(waiting.name)
        assert "node 0: its namespace's quota none is used up: it requests pods=1, and the limit is pods=0" in (
            result.reason
        )
