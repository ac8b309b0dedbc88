"""Tests of pods that request more than any machine has, by the real scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure.activities.cluster.activities import watching_clusters
from perdure.activities.nodes.kubernetes import KubernetesBackend
from perdure.contract import JobPhase
from perdure.contract.names import WORKER_TASK_QUEUE
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure, start
from tests.support.waiting import eventually

LONG = 240.0
"""Seconds for a job that starts torch once."""


@pytest.mark.long("cluster-faults")
@pytest.mark.timeout(420)
async def test_a_job_that_no_machine_has_room_for_runs_with_less(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path
) -> None:
    script = results / "train.py"
    script.write_text(f"import pathlib\npathlib.Path({str(results)!r}, 'trained').touch()\n")
    worker: dict[str, Any] = {
        "nodes": 1,
        "image": BARE_IMAGE,
        "command": ["torchrun", str(script)],
        "resources": {"cpu": 4000, "memory": "900Ti"},
        "scaling": {"relax": {"cpu": "100m", "memory": "1Gi", "after": "2s"}},
        "pod_template": with_host_programs(results),
    }
    async with perdure(cluster, job.namespace) as (_, client):
        training = await start(client, worker, results)
        result = await asyncio.wait_for(client.wait(training.name), LONG)
        assert result.phase is JobPhase.SUCCEEDED
        assert (results / "trained").exists()
        status = await training.status()
        assert status.requests == {"cpu": "100m", "memory": "1Gi"}
        [entry] = [one for one in await training.incidents() if one.observation is not None]
        assert entry.observation is not None
        assert entry.observation.smaller_requests
        assert entry.title == (
            "new nodes request 100m instead of 4000 of cpu and 1Gi instead of 900Ti of memory: no machine has room for "
            "more"
        )
        assert "Insufficient cpu" in entry.evidence[0].text


@pytest.mark.long("cluster-faults")
@pytest.mark.timeout(420)
async def test_a_job_does_not_request_less_while_no_machine_has_room_for_that_either(
    cluster: TestCluster, backend: KubernetesBackend, job: PodJob, results: Path
) -> None:
    worker: dict[str, Any] = {
        "nodes": 1,
        "image": BARE_IMAGE,
        "command": ["torchrun", "train.py"],
        "resources": {"cpu": 4000},
        "scaling": {"relax": {"cpu": 3900, "after": "1m"}},
    }
    async with (
        perdure(cluster, job.namespace) as (server, client),
        watching_clusters(await server.client(), [backend], task_queue=WORKER_TASK_QUEUE, sharing=None),
    ):
        training = await start(client, worker, results)

        async def holds() -> bool:
            return any(one.nowhere for one in (await training.status()).smaller)

        await eventually(holds, within=LONG)
        status = await training.status()
        assert [(one.requested, one.enough) for one in status.smaller] == [("4000", "3900")]
        assert status.requests["cpu"] == "4000"
        await client.cancel(training.name)
        assert (await client.wait(training.name)).phase is JobPhase.CANCELLED
