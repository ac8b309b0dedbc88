"""Tests of `perdure import --run` with the shared control plane and real nodes."""

from __future__ import annotations

import sys

import pytest

from tests.support.command_line import CommandLine

SCRIPT = """\
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"rank {dist.get_rank()} of {dist.get_world_size()} {os.environ['GREETING']} {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""

JOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: NAME}
spec:
  nprocPerNode: "1"
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: pytorch
              image: registry.example/none:1
              command: [PYTHON, -m, torch.distributed.run, --rdzv_backend=static, --master_port=1, script.py]
              args: [--data, $(DATA)]
              env: [{name: DATA, value: /data}, {name: GREETING, value: hello}]
"""


@pytest.mark.long("commands")
def test_another_system_s_job_runs_as_it_is(command_line: CommandLine, job_name: str):
    command_line.write("script.py", SCRIPT)
    command_line.write("job.yaml", JOB.replace("NAME", job_name).replace("PYTHON", sys.executable))
    done = command_line.run("import", "job.yaml", "--backend", "local", "--run")
    assert done.code == 0, done
    assert "SUCCEEDED" in done.out
    assert "containers[0].image" in done.err
    logs = command_line.run("logs", job_name)
    assert "rank 0 of 2 hello ['--data', '/data']" in logs.out
    assert "rank 1 of 2 hello ['--data', '/data']" in logs.out
