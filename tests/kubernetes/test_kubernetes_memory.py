"""Checkpoints in the memory of pods: after a killed rank it is the same pod's, after a lost pod another one's."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from activities.nodes.kubernetes.merge import merge
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure, start
from tests.kubernetes.test_kubernetes_job import one_pod_per_machine
from tests.support.allocation import REPOSITORY
from tests.support.waiting import eventually
from tests.system.made_steps import repeated, steps
from tests.system.site import PATIENCE
from workflows.messages import JobPhase

STEPS = 300


@pytest.mark.long("cluster-faults")
@pytest.mark.parametrize("example", ["plain.py", "sharded.py"])
async def test_a_killed_rank_and_a_lost_pod_lose_at_most_one_step(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path, example: str
) -> None:
    name = f"k-{secrets.token_hex(4)}"
    script = REPOSITORY / "examples" / "checkpoints" / example
    async with perdure(cluster, job.namespace) as (_, client):
        worker = {
            "nodes": 2,
            "image": BARE_IMAGE,
            "command": ["torchrun", str(script), "--steps", str(STEPS), "--out", str(results)],
            "resources": {"shm": "32Mi"},
            "pod_template": merge(with_host_programs(results), one_pod_per_machine(name)),
        }
        training = await start(client, worker, results, name=name)
        await eventually(lambda: 30 in steps(training, 0), within=PATIENCE)
        training.signal(1, "rank")
        await training.running(nodes=2, after=1)
        made = steps(training, 0)[-1]
        await eventually(lambda: steps(training, 0)[-1] >= made + 10, within=PATIENCE)
        training.signal(0, None)
        result = await client.wait(name)
        assert result.phase is JobPhase.SUCCEEDED
        assert [incident.culprit for incident in await training.incidents()][:2] == [1, 0]
        for rank in (0, 1):
            assert sorted(set(steps(training, rank))) == list(range(1, STEPS + 1))
            assert repeated(steps(training, rank)) <= 2
