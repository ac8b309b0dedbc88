"""Tests of uploading code from the submitting machine: through Temporal into ConfigMaps, and from there into pods."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest
import yaml
from temporalio.client import WorkflowFailureError

from perdure.base.errors import JobAlreadyRunning, Refused
from perdure.client.client import Client
from perdure.client.uploads import PART_BYTES, upload_workdir
from perdure.contract import JobPhase
from perdure.contract.names import TRAINING_JOB, WORKER_TASK_QUEUE, job_workflow_id
from perdure.spec.validate import validate_spec
from perdure.worker import running_worker
from scripts.cluster.cluster import Cluster
from tests.kubernetes.pods import PodJob, TestCluster, role
from tests.kubernetes.test_kubernetes_job import perdure
from tests.support.temporal_server import dev_server
from tests.support.waiting import eventually

SCRIPT = """\
import os, pathlib, subprocess, sys, time
from beside import answer

pathlib.Path("written").write_text("by training")
said = subprocess.check_output(["./data/tool.sh"], text=True).strip()
size = os.path.getsize("data/link")
results = pathlib.Path(sys.argv[1])
(results / "said").write_text(f"{answer} {said} {size} {os.getcwd()} {os.path.exists('secret.txt')}")
while not (results / "enough").exists():
    time.sleep(0.1)
"""


def submission(job: PodJob, code: Path, results: Path, *, name: str) -> dict[str, Any]:
    command = ["torchrun", "train.py", str(results)]
    return {
        "name": name,
        "namespace": job.namespace,
        "backend": "kubernetes",
        "workdir": {"path": str(code), "exclude": ["secret.txt"]},
        "env": {"OMP_NUM_THREADS": "1"},
        "limits": {"termination_grace_period": "2s"},
        "roles": {"worker": role(results, command=command)},
    }


async def config_maps(job: PodJob) -> list[str]:
    found = await job.api.list(job.anchors_path, labels="app.kubernetes.io/managed-by=perdure")
    return sorted(one["metadata"]["name"] for one in found)


async def no_config_maps(job: PodJob) -> bool:
    return not await config_maps(job)


async def test_a_job_runs_the_code_of_the_submitting_machine(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    code, results = tmp_path / "code", tmp_path / "results"
    results.mkdir()
    (code / "data").mkdir(parents=True)
    (code / "train.py").write_text(SCRIPT)
    (code / "beside.py").write_text("answer = 42\n")
    (code / "secret.txt").write_text("left out")
    # More than one part, since random bytes cannot be compressed.
    (code / "data/weights").write_bytes(os.urandom(PART_BYTES))
    (code / "data/link").symlink_to("weights")
    (code / "data/tool.sh").write_text("#!/bin/sh\necho runs\n")
    (code / "data/tool.sh").chmod(0o755)
    name = f"w-{secrets.token_hex(4)}"
    spec = submission(job, code, results, name=name)
    spec["workdir"]["path"] = "code"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    said: list[str] = []
    async with perdure(cluster, job.namespace) as (_, client):
        await client.submit(tmp_path / "job.yaml", report=said.append)
        assert said[0].startswith("Uploading the working directory: 5 files")
        assert (await client.status(name)).workdir_digest.startswith("sha256:")
        # Two of a name at once: one runs, and the other one's code does not stay.
        with pytest.raises(JobAlreadyRunning):
            await client.submit(tmp_path / "job.yaml")

        async def only_its_own() -> bool:
            _, *archive = await config_maps(job)
            return len(archive) == 3

        async def said_by_training() -> bool:
            return (results / "said").exists()

        await eventually(said_by_training)
        await eventually(only_its_own)
        (results / "enough").touch()
        result = await client.wait(name)
        assert result.phase is JobPhase.SUCCEEDED, result
        await eventually(lambda: no_config_maps(job))
    assert (results / "said").read_text() == f"42 runs {PART_BYTES} /perdure/workdir False"
    assert not (code / "written").exists()


async def test_code_that_no_job_takes_does_not_stay(cluster: TestCluster, job: PodJob, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    spec, _ = validate_spec(submission(job, tmp_path, tmp_path, name="w-none"))
    async with perdure(cluster, job.namespace) as (server, client):
        temporal = await server.client()

        async def interrupted() -> None:
            async with upload_workdir(temporal, spec, task_queue=WORKER_TASK_QUEUE) as complete:
                assert complete.workdir
                assert complete.workdir.archive
                name = complete.workdir.archive.name
                assert await config_maps(job) == [name, f"{name}-0"]
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await interrupted()
        await eventually(lambda: no_config_maps(job))

        # A client that starts the workflow itself cannot have uploaded anything.
        plain = json.loads(spec.model_dump_json(exclude_defaults=True))
        with pytest.raises(WorkflowFailureError) as failed:
            await temporal.execute_workflow(
                TRAINING_JOB, plain, id=job_workflow_id(job.namespace, "w-none"), task_queue=WORKER_TASK_QUEUE
            )
        assert "was not uploaded" in str(failed.value.cause)
        assert "perdure submit" in str(failed.value.cause)

        plain["workdir"]["archive"] = {
            "name": f"perdure-workdir-{'0' * 16}",
            "parts": 1,
            "digest": f"sha256:{'0' * 64}",
        }
        await client.submit(plain)
        result = await client.wait("w-none")
        assert result.phase is JobPhase.FAILED
        assert "is not in namespace" in result.reason
        assert "Submit the job again" in result.reason


async def test_a_worker_that_may_not_keep_code_says_which_right_it_lacks(
    own_cluster: Cluster, cluster: TestCluster, job: PodJob, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    spec = submission(job, tmp_path, tmp_path, name="w-forbidden")
    powerless = cluster.backend(kubeconfig=own_cluster.kubeconfig_of("powerless"))
    async with dev_server() as server, running_worker(await server.client(), backends=[powerless]):
        client = Client(address=server.address)
        with pytest.raises(Refused, match='User "powerless" cannot create resource "configmaps"'):
            await client.submit(spec)
    await powerless.close()
