"""Tests of files for other submitters of Ray jobs: `perdure import --run` runs them on a real cluster to their end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.contract import JobPhase
from tests.support.command_line import PERDURE
from tests.system.ray_cluster import RayCluster
from tests.system.ray_jobs import ACTORS, GROUPS, asked
from tests.system.site import Site

pytestmark = [pytest.mark.long("ray"), pytest.mark.timeout(400)]

SCRIPT = (
    "import os, pathlib, sys\npathlib.Path(sys.argv[1]).write_text(os.getcwd() + ' ' + os.environ['RAY_ADDRESS'])\n"
)


def submission(folder: Path, command: str) -> dict[str, Any]:
    """The file of DLRover's submitter."""
    return {"dashboardUrl": "http://localhost:8265", "command": command, "workingDir": str(folder)}


def ray_job(folder: Path, command: str) -> dict[str, Any]:
    """KubeRay's RayJob."""
    container = {"name": "ray-worker", "image": "rayproject/ray:2.60.0", "resources": {"limits": {"cpu": "1"}}}
    template = {"spec": {"containers": [container]}}
    cluster = {
        "headGroupSpec": {"rayStartParams": {}, "template": template},
        "workerGroupSpecs": [{"groupName": "small", "replicas": 1, "rayStartParams": {}, "template": template}],
    }
    runtime = yaml.safe_dump({"working_dir": str(folder)})
    spec = {"entrypoint": command, "runtimeEnvYAML": runtime, "rayClusterSpec": cluster}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "imported"}, "spec": spec}


@pytest.mark.parametrize("written", [submission, ray_job])
async def test_a_job_that_was_written_for_ray_runs_on_ray_to_its_end(
    cluster: RayCluster, ray_site: Site, tmp_path: Path, written: Any
):
    await cluster.start(machines=1)
    code, found, file = tmp_path / "code", tmp_path / "found", tmp_path / "imported.yaml"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    file.write_text(yaml.safe_dump(written(code, f"python train.py {found}")))
    process = await asyncio.create_subprocess_exec(
        *(*PERDURE, "import", "--run", str(file)),
        env={**os.environ, "TEMPORAL_ADDRESS": ""},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    if written is submission:
        assert f"runs on the Ray cluster {cluster.address}, which http://localhost:8265 names" in printed.decode()
    folder, address = found.read_text().split()
    # The folder was uploaded, and Ray names its head in its own way.
    assert (Path(folder).name, address.rpartition(":")[2]) == ("workdir", str(cluster.port))
    (job,) = await ray_site.client.list()
    assert job.phase is JobPhase.SUCCEEDED
    assert await asked(cluster, ACTORS) == []
    assert await asked(cluster, GROUPS) == []
