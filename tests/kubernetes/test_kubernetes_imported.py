"""Tests of imported jobs of other systems, which train to the end on real nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.activities.nodes.kubernetes.merge import merge
from scripts.cluster.cluster import Cluster
from scripts.cluster.host_programs import with_host_programs
from scripts.cluster.images import BARE_IMAGE
from tests.kubernetes.pods import PodJob, TestCluster
from tests.kubernetes.site import perdure
from tests.support.command_line import CommandLine
from tests.system.site import SCRIPT
from tests.system.site import Job as Training

pytestmark = pytest.mark.long("cluster-faults")

ELASTIC_JOB = f"""\
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: torch-mnist
spec:
  distributionStrategy: AllreduceStrategy
  optimizeMode: single-job
  replicaSpecs:
    worker:
      replicas: 2
      restartCount: 3
      template:
        spec:
          restartPolicy: Never
          containers:
            - name: main
              image: {BARE_IMAGE}
              imagePullPolicy: IfNotPresent
              command:
                - /bin/sh
                - -c
                - "echo $STEPS steps; dlrover-run --network-check --nnodes=$WORKER_NUM --nproc_per_node=1
                  --max_restarts=3 {SCRIPT} $RESULTS --steps $STEPS"
              env: [{{name: STEPS, value: "20"}}, {{name: OMP_NUM_THREADS, value: "1"}}]
              resources:
                limits: {{cpu: "2", memory: 3Gi}}
                requests: {{cpu: 100m, memory: 512Mi}}
"""

PYTORCH_JOB = f"""\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: pytorch-simple
spec:
  runPolicy: {{cleanPodPolicy: None}}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template: &template
        spec:
          containers:
            - name: pytorch
              image: {BARE_IMAGE}
              imagePullPolicy: IfNotPresent
              command: [python3, {SCRIPT}]
              args: [$(RESULTS), --steps=20]
              env: [{{name: OMP_NUM_THREADS, value: "1"}}]
              ports: [{{name: pytorchjob-port, containerPort: 23456}}]
    Worker:
      replicas: 1
      restartPolicy: OnFailure
      template: *template
"""


@pytest.mark.parametrize(
    ("text", "container"), [(ELASTIC_JOB, "main"), (PYTORCH_JOB, "pytorch")], ids=["ElasticJob", "PyTorchJob"]
)
async def test_another_system_s_job_trains_to_its_end(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, results: Path, tmp_path: Path, text: str, container: str
) -> None:
    source = yaml.safe_load(text)
    source["metadata"]["namespace"] = job.namespace
    name = source["metadata"]["name"]
    replicas = source["spec"].get("replicaSpecs") or source["spec"]["pytorchReplicaSpecs"]
    for one in replicas.values():
        one["template"] = _on_this_machine(one["template"], container, results)
    async with perdure(cluster, job.namespace) as (server, client):
        command_line = CommandLine(tmp_path, server.environment)
        command_line.write("theirs.yaml", yaml.safe_dump(source))
        # In a thread: the worker that answers is in this process.
        done = await asyncio.to_thread(command_line.run, "import", "theirs.yaml", "--run", within=240)
        assert done.code == 0, done
        assert "SUCCEEDED" in done.out
        status = await client.status(name)
        training = Training(client, name, status.uid, results)
        ends = {(step.rank, step.world_size) for step in training.steps() if step.number == 20}
        assert ends == {(0, 2), (1, 2)}
        assert not await client.incidents(name)


def _on_this_machine(template: dict[str, Any], container: str, results: Path) -> dict[str, Any]:
    """The same pods with this machine's Python and torch, where the image of a user has its own."""
    ours = with_host_programs(results)
    [programs] = ours["spec"]["containers"]
    programs |= {"name": container, "env": [*programs["env"], {"name": "RESULTS", "value": str(results)}]}
    return merge(ours, template)
