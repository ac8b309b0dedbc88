"""Tests of how the command line shows whether a job controls its ranks' rendezvous; with real jobs and launchers."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from perdure.client.sync import SyncClient
from perdure.contract import JobPhase
from tests.launcher.nodes import TORCHRUN
from tests.support.command_line import CommandLine

DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")

ALONE = """\
import time
from pathlib import Path

import torch

weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
while not Path("finish").exists():
    weight.grad = torch.ones(1)
    optimizer.step()
    time.sleep(0.02)
"""


@pytest.mark.long("commands")
def test_a_launcher_with_a_rendezvous_of_its_own_fails_the_job_and_is_told_what_to_write(
    command_line: CommandLine, job_name: str
) -> None:
    done = command_line.run("run", "--name", job_name, "--nodes", "2", "--", DEEPSPEED, "--num_gpus=1", "train.py")
    assert done.code == 2, done
    assert "the deepspeed launcher starts ranks by itself" in done.out
    status = command_line.run("status", job_name)
    assert "rendezvous UNPROTECTED" in status.out
    assert "write instead: torchrun --nproc-per-node=1 train.py" in " ".join(status.out.split())
    known = command_line.run("status", job_name, "-o", "json").json
    assert (known["phase"], known["protected"]) == ("FAILED", False)


@pytest.mark.long("launchers")
def test_what_contradicts_the_job_is_a_warning_while_it_trains(
    command_line: CommandLine, jobs: SyncClient, job_name: str
) -> None:
    command_line.write("train.py", ALONE)
    command = [*TORCHRUN, "--nnodes=4", "train.py"]
    done = command_line.run("run", "-d", "--name", job_name, "--nodes", "1:2", "--", *command)
    assert done.code == 0, done
    for snapshot in jobs.watch(job_name, interval=timedelta(seconds=0.2)):
        nodes = [node for node in snapshot.nodes if node.group_rank is not None]
        if len(nodes) == 2 and all(node.progress and node.progress.apart for node in nodes):
            break
        assert snapshot.status is None or snapshot.status.phase is not JobPhase.FAILED, snapshot
    status = " ".join(command_line.run("status", job_name).out.split())
    assert "rendezvous protected" in status
    assert "WARNING the command asks for 4 nodes" in status
    assert "WARNING ranks on nodes 0, 1 step without a process group" in status
    known = command_line.run("status", job_name, "-o", "json").json
    assert known["protected"]
    assert len(known["warnings"]) == 2
    with command_line.start("watch", job_name) as watch:
        assert watch.stdout
        assert any("warning: the command asks for 4 nodes" in line for line in watch.stdout)
        command_line.write("finish", "")
        rest = watch.stdout.read()
    assert (watch.returncode, "SUCCEEDED" in rest) == (0, True), rest
