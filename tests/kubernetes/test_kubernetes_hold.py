"""Tests of a failed job that is held: a user opens a shell in the failed pod, and then releases the job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from perdure.contract import JobPhase
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.site import perdure, start
from tests.support.command_line import CommandLine
from tests.support.waiting import eventually


@pytest.mark.long("cluster-faults")
async def test_a_shell_in_the_pod_of_a_failed_job(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    in_tmp = {"spec": {"containers": [{"name": "training", "workingDir": "/tmp"}]}}
    command = ["sh", "-c", "[ $RANK = 0 ] && sleep 600; touch failed-here; exit 2"]
    worker = role(nodes=2, rendezvous="env", command=command, pod_template=in_tmp)
    async with perdure(cluster, job.namespace) as (server, client):
        failed = await start(client, worker, tmp_path, env={"MODEL": "llama"}, hold_on_failure="1h")
        await failed.until(lambda s: s.phase is JobPhase.HELD)
        command_line = CommandLine(tmp_path, {**server.environment, "KUBECONFIG": cluster.kubeconfig})
        looks = ("sh", "-c", "ls -d failed-here; echo $MODEL; env | grep ^PERDURE_")
        # In a thread: the worker that answers is in this process.
        shown = await asyncio.to_thread(command_line.run, "shell", failed.name, "-n", job.namespace, "--", *looks)
        assert shown.out.splitlines() == ["failed-here", "llama"], shown

        await client.cancel(failed.name)
        assert (await client.wait(failed.name)).phase is JobPhase.FAILED
        await eventually(job.nothing_left)
